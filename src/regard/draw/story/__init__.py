"""The story of a text: the heads worth seeing, each in a sentence whose numbers come from the record."""

from regard.draw.story.cards import Card, Story, story
from regard.draw.story.maps import Link
from regard.draw.story.trees import Tree, tree_of

__all__ = ["Card", "Link", "Story", "Tree", "story", "tree_of"]
