"""Heads: look at them while any model runs (`watch`), and act on them (`ablate`, `importance`, `prune`)."""

from regard.heads import probes
from regard.heads.ablate import ablate
from regard.heads.attribution import Attribution, attribution
from regard.heads.corpus import token_kinds, watch_all
from regard.heads.effect import effect, effects, loss_of
from regard.heads.importance import Importance, importance, leave_one_out
from regard.heads.prune import prune
from regard.heads.pruned import load_pruned, save_pruned
from regard.heads.record import Layer, Record
from regard.heads.roles import ROLES, Role, Roles
from regard.heads.syntax import Syntax, syntax
from regard.heads.table import Table
from regard.heads.watch import watch

__all__ = [
    "ROLES",
    "Attribution",
    "Importance",
    "Layer",
    "Record",
    "Role",
    "Roles",
    "Syntax",
    "Table",
    "ablate",
    "attribution",
    "effect",
    "effects",
    "importance",
    "leave_one_out",
    "load_pruned",
    "loss_of",
    "probes",
    "prune",
    "save_pruned",
    "syntax",
    "token_kinds",
    "watch",
    "watch_all",
]
