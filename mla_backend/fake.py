"""Fake implementations for torch.compile. The ops return nothing, and write only into the tensors that their schemas
mark. The Python functions around them make these tensors, so torch.compile traces the shapes by itself."""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_backend import library

OPS: tuple[str, ...] = tuple(library.about()["ops"])


def _writes_its_arguments(name: str) -> Callable[..., None]:
    names = [argument.name for argument in getattr(torch.ops.mla_backend, name).default._schema.arguments]

    def fake(*arguments: object) -> None:
        tensors = [(n, a) for n, a in zip(names, arguments, strict=True) if isinstance(a, Tensor)]
        first = tensors[0][1].device
        for argument, tensor in tensors:
            # without this a tensor on the meta device among real ones would end up here, and nothing be computed
            if tensor.device != first:
                raise ValueError(
                    f"{argument} must be on {first} like the first argument; got a tensor on {tensor.device}"
                )

    return fake


for _name in OPS:
    torch.library.register_fake(f"mla_backend::{_name}", _writes_its_arguments(_name))
