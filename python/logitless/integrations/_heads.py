# SPDX-License-Identifier: Apache-2.0
"""The head of a model: a plain Linear, or what PEFT has made of it.

PEFT is not a dependency: its classes are looked up only if PEFT has been imported, because
otherwise no module can be of one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless._errors import LogitlessError, not_supported, wrong_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SAVED = ("peft.utils.other", "ModulesToSaveWrapper")
_LORA = ("peft.tuners.lora.layer", "Linear")
_ALLOWED = (
    "allowed: a plain torch.nn.Linear, and of PEFT modules_to_save or a LoRA without variants on it"
)


def through(head: Any, function: Callable[[Tensor], Any], input: Tensor) -> Any:
    """Returns function(input), called in place of the head's forward. The head's hooks run: they
    gather its parameters under FSDP, and wait for them under Megatron's distributed optimizer."""
    own = head.__dict__.get("forward")
    head.forward = function
    try:
        return head(input)
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _is(module: Any, name: tuple[str, str]) -> bool:
    """Whether the module is of that class, or of a derived class that computes the same (such as
    FSDP's)."""
    known = getattr(sys.modules.get(name[0]), name[1], None)
    return known is not None and isinstance(module, known) and _computes_as(module, known)


def _refused(what: str) -> LogitlessError:
    return not_supported(
        f"the lm_head is {what}; {_ALLOWED} (leave lm_head out of target_modules, merge the "
        "adapter, or leave the head unquantized)"
    )


def _computes_as(module: Any, known: Any) -> bool:
    return bool(type(module).forward is known.forward)


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and _computes_as(module, torch.nn.Linear)


def is_lora(module: Any) -> bool:
    return _is(module, _LORA)


def parts(head: Any) -> tuple[Any, ...]:
    """The modules of the head that may be called to compute its logits. Raises for an unknown kind
    of head."""
    if _is_linear(head):
        return (head,)
    # Only one of these is called: the copy of the head for an adapter, or the head itself.
    if _is(head, _SAVED):
        within = (head.original_module, *head.modules_to_save.values())
        return tuple(part for module in within for part in parts(module))
    if is_lora(head):
        _check_lora(head)
        return (head, *parts(head.base_layer))
    raise _refused(f"a {type(head).__module__}.{type(head).__qualname__}")


_UNQUANTIZED = (
    'leave the head out of the quantization, as BitsAndBytesConfig(llm_int8_skip_modules=["lm_head"'
    ']) and TorchAoConfig(modules_to_not_convert=["lm_head"]) do'
)


def check_weight(part: Any) -> None:
    """Refuses a weight that is not a plain matrix of f32, f16 or bf16: other dtypes, and tensor
    classes that redefine operations (such as torchao's), except distributed tensors."""
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor):
        return
    if weight.dtype not in _DTYPES:
        allowed = ", ".join(str(allowed)[6:] for allowed in _DTYPES)
        casts = weight.dtype in (torch.float64, torch.complex64, torch.complex128)
        way = "model.to(torch.float32) before the patch" if casts else _UNQUANTIZED
        raise wrong_dtype(f"lm_head.weight is {str(weight.dtype)[6:]}; allowed: {allowed} ({way})")
    kind: Any = type(weight)
    known = kind.__torch_dispatch__ == Tensor.__torch_dispatch__ or hasattr(weight, "placements")
    if not known and kind.__module__.partition(".")[0] != "torch":
        raise not_supported(
            f"lm_head.weight is a {kind.__module__}.{kind.__qualname__}; allowed: a plain or a "
            f"distributed tensor ({_UNQUANTIZED})"
        )


def slot(part: Any) -> str:
    """The name of the attribute that is the part's own forward: accelerate's hooks move it to
    another one."""
    found = vars(part)
    if "_hf_hook" in found and "_old_forward" in found:
        return "_old_forward"
    own = found.get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(part).forward:
        raise not_supported(
            f"the forward of the lm_head was replaced, by {getattr(own, '__qualname__', own)!s}; "
            "allowed: hooks of torch's or accelerate's (what comes after the patch is called)"
        )
    return "forward"


def is_off(layer: Any) -> bool:
    """Whether the base layer alone computes the logits, because the LoRA is disabled or merged into
    its weight."""
    return bool(layer.disable_adapters or layer.merged)


def is_random(part: Any) -> bool:
    """Whether two calls compute different logits, because of a LoRA's dropout."""
    if not is_lora(part) or is_off(part):
        return False
    dropouts = [part.lora_dropout[name] for name in _active(part)]
    return any(dropout.training and getattr(dropout, "p", 0) for dropout in dropouts)


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _check_lora(layer: Any) -> None:
    """Raises for LoRAs that with_lora does not compute: offloaded ones, PEFT's variants (such as
    DoRA), and matrices that are no plain Linear or have a bias."""
    if is_off(layer):
        return
    variants = {name: "DoRA" for name, used in getattr(layer, "use_dora", {}).items() if used}
    for name, variant in getattr(layer, "lora_variant", {}).items():
        variants[name] = getattr(variant, "__name__", type(variant).__name__)
    for name in _active(layer):
        a, b = layer.lora_A[name], layer.lora_B[name]
        if any(weight.is_meta for weight in (layer.base_layer.weight, a.weight, b.weight)):
            raise _refused(f"PEFT's LoRA {name!r} with a weight that is offloaded")
        if name in variants:
            raise _refused(f"PEFT's LoRA {name!r} of a variant ({variants[name]})")
        if b.bias is not None:
            raise _refused(f"PEFT's LoRA {name!r} with a bias of its own (lora_bias)")
        if not (_is_linear(a) and _is_linear(b)):
            raise _refused(f"PEFT's LoRA {name!r} whose matrix is a {type(b).__qualname__}")


def with_lora(layer: Any, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(input [..., D + r], weight [V, D + r], bias) that give the logits of PEFT's LoRA of rank r
    on the head. W·x + s·B·(A·x) is one product of [W, B] and [x, s·A·x], so that the two terms are
    not rounded before they are added. A·x and B are cast to the dtypes of input and weight, even if
    PEFT keeps them in a wider dtype."""
    base = layer.base_layer
    input = input.to(base.weight.device)
    inputs, weights = [input], [base.weight]
    for name in _active(layer):
        a, b = layer.lora_A[name], layer.lora_B[name]
        x = layer._cast_input_dtype(input, a.weight.dtype)
        inputs.append((a(layer.lora_dropout[name](x)) * layer.scaling[name]).to(input.dtype))
        weights.append(b.weight.to(base.weight.dtype))
    if len(inputs) == 1:
        return input, base.weight, base.bias
    return torch.cat(inputs, -1), torch.cat(weights, -1), base.bias
