"""A draft checkpoint on disk: its configuration and what its files hold, without loading it."""

from eyas.align.draft.checkpoint import Draft, DraftTensor, read_draft
from eyas.align.draft.config import CONFIG_FILE, DraftConfig, DraftError, Rope, declared_rope

__all__ = ["CONFIG_FILE", "Draft", "DraftConfig", "DraftError", "DraftTensor", "Rope", "declared_rope", "read_draft"]
