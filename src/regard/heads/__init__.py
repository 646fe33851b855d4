"""Attention heads of any model: record them while it runs (`watch`), analyse them, and change them (`ablate`, `prune`).

The README beside this file says the way of the data."""

from regard.heads.analysis import circuits, probes
from regard.heads.analysis.atlas import Atlas
from regard.heads.analysis.atlas_making import make_atlas as atlas
from regard.heads.analysis.difference import Difference
from regard.heads.analysis.joint_blocks import JointBlocks, joint_blocks
from regard.heads.analysis.roles import ROLES, Role, Roles
from regard.heads.analysis.syntax import Syntax, coreference, syntax
from regard.heads.analysis.text_loss import effect, effects, loss_of
from regard.heads.analysis.token_classes import token_kinds
from regard.heads.interventions.ablate import ablate
from regard.heads.interventions.attribution import Attribution, attribution
from regard.heads.interventions.importance import Importance, importance, leave_one_out
from regard.heads.interventions.patching import attribution_patching, sweep
from regard.heads.interventions.patching_result import Patching
from regard.heads.interventions.prune import load_pruned, prune, save_pruned
from regard.heads.record.record import LayerRecord, Record
from regard.heads.record.table import Table
from regard.heads.training.health import AttentionWarning, Limits
from regard.heads.training.monitor import Sample, monitor
from regard.heads.training.qk_clip import qk_clip
from regard.heads.watch import watch
from regard.heads.watch_all import watch_all

Layer = LayerRecord  # its name up to 0.1

__all__ = [
    "ROLES",
    "Atlas",
    "AttentionWarning",
    "Attribution",
    "Difference",
    "Importance",
    "JointBlocks",
    "Layer",
    "LayerRecord",
    "Limits",
    "Patching",
    "Record",
    "Role",
    "Roles",
    "Sample",
    "Syntax",
    "Table",
    "ablate",
    "atlas",
    "attribution",
    "attribution_patching",
    "circuits",
    "coreference",
    "effect",
    "effects",
    "importance",
    "joint_blocks",
    "leave_one_out",
    "load_pruned",
    "loss_of",
    "monitor",
    "probes",
    "prune",
    "qk_clip",
    "save_pruned",
    "sweep",
    "syntax",
    "token_kinds",
    "watch",
    "watch_all",
]
