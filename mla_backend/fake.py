"""What torch.compile needs to know of the ops: they return nothing, and write only into the tensors that their
schemas mark. The tensors are made by the Python functions around them, whose shapes it traces by itself."""

import torch

from mla_backend import library  # noqa: F401  (registers the ops)

OPS = ("sparse_attention", "plan", "merge_partials", "cache_write", "cache_gather", "convert_indices")


def _writes_its_arguments(*arguments: object) -> None:
    return None


for _name in OPS:
    torch.library.register_fake(f"mla_backend::{_name}", _writes_its_arguments)
