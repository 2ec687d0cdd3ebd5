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
# The classes that PEFT puts around a module, except ModulesToSaveWrapper.
_ADAPTERS = (
    _LORA,
    ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    ("peft.utils.other", "TrainableTokensWrapper"),
)
_ALLOWED = (
    "allowed: a plain torch.nn.Linear, and of PEFT modules_to_save or an adapter that is a matrix"
)


# Attributes of a module that hold replacements of its class's methods.
REPLACED = ("forward", "_old_forward", "_replicate_for_data_parallel")


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


def refused(what: str) -> LogitlessError:
    return not_supported(
        f"the lm_head is {what}; {_ALLOWED} (leave lm_head out of target_modules, merge the "
        "adapter, or leave the head unquantized)"
    )


def _computes_as(module: Any, known: Any) -> bool:
    return bool(type(module).forward is known.forward)


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and _computes_as(module, torch.nn.Linear)


def is_adapter(module: Any) -> bool:
    kinds = (getattr(sys.modules.get(name), kind, None) for name, kind in _ADAPTERS)
    return any(kind is not None and isinstance(module, kind) for kind in kinds)


def parts(head: Any) -> tuple[Any, ...]:
    """The modules of the head that may be called to compute its logits. Raises for an unknown kind
    of head."""
    if _is_linear(head):
        return (head,)
    # Only one of these is called: the copy of the head for an adapter, or the head itself.
    if _is(head, _SAVED):
        within = (head.original_module, *head.modules_to_save.values())
        return tuple(part for module in within for part in parts(module))
    if is_adapter(head):
        _check_adapter(head)
        return (head, *parts(_within(head)))
    raise refused(f"a {name_of(head)}")


def name_of(module: Any) -> str:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    variants = _variants_of(module)
    return f"{name} ({', '.join(variants)})" if variants else name


def _variants_of(adapter: Any) -> list[str]:
    """The names of PEFT's variants of a LoRA, of its active adapters."""
    known: dict[str, Any] = getattr(adapter, "lora_variant", {})
    active = (known[name] for name in getattr(adapter, "active_adapters", ()) if name in known)
    return [getattr(v, "__name__", type(v).__name__) for v in active]


def _within(adapter: Any) -> Any:
    """The module that the adapter wraps."""
    found = vars(adapter)["_modules"]
    return next((found[name] for name in ("base_layer", "token_adapter") if name in found), None)


_UNQUANTIZED = (
    'leave the head out of the quantization, as BitsAndBytesConfig(llm_int8_skip_modules=["lm_head"'
    ']) and TorchAoConfig(modules_to_not_convert=["lm_head"]) do'
)


def check_weight(part: Any) -> None:
    """Refuses dtypes other than f32, f16 and bf16, and tensor classes that redefine operations
    (such as torchao's), except torch's own and distributed tensors."""
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor):
        return
    if weight.dtype not in _DTYPES:
        allowed = ", ".join(str(allowed)[6:] for allowed in _DTYPES)
        casts = weight.dtype in (torch.float64, torch.complex64, torch.complex128)
        way = "model.to(torch.float32) before the patch" if casts else _UNQUANTIZED
        raise wrong_dtype(f"lm_head.weight is {str(weight.dtype)[6:]}; allowed: {allowed} ({way})")
    kind: Any = type(weight)
    functions = (torch.Tensor, torch.nn.Parameter)
    plain = kind.__torch_dispatch__ == Tensor.__torch_dispatch__ and any(
        kind.__torch_function__ == known.__torch_function__ for known in functions
    )
    if (
        not plain
        and not hasattr(weight, "placements")
        and kind.__module__.partition(".")[0] != "torch"
    ):
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


def is_off(adapter: Any) -> bool:
    """Whether the layer inside computes the logits alone, because the adapter is disabled or merged
    into its weight."""
    return bool(getattr(adapter, "disable_adapters", False) or getattr(adapter, "merged", False))


def state_of(part: Any) -> tuple[Any, ...]:
    """Whether the part's adapters are off, and the active ones; () for a plain Linear."""
    if not is_adapter(part):
        return ()
    names: Any = getattr(part, "active_adapters", ())
    return is_off(part), *(() if callable(names) else names)


def is_random(part: Any) -> bool:
    """Whether two calls compute different logits, because of a LoRA's dropout."""
    if not is_adapter(part) or is_off(part) or not is_plain_lora(part):
        return False
    dropouts = [part.lora_dropout[name] for name in _active(part)]
    return any(dropout.training and getattr(dropout, "p", 0) for dropout in dropouts)


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def is_plain_lora(layer: Any) -> bool:
    """Whether the layer adds s·B·(A·x) to a plain Linear's output. PEFT's variants (DoRA, ...)
    have formulas of their own."""
    if not (_is(layer, _LORA) and _is_linear(layer.base_layer)):
        return False
    return not _variants_of(layer) and not any(
        getattr(layer, "use_dora", {}).get(name)
        or layer.lora_B[name].bias is not None
        or not (_is_linear(layer.lora_A[name]) and _is_linear(layer.lora_B[name]))
        for name in _active(layer)
    )


def _check_adapter(adapter: Any) -> None:
    """Raises for an adapter that can be refused before its first call."""
    if is_off(adapter):
        return
    if any(weight.is_meta for weight in adapter.parameters()):
        raise refused(f"a {name_of(adapter)} with a weight that is offloaded")
    # Activated LoRA depends on a token's position, Arrow chooses an adapter for each token.
    if any(name.startswith(("ALora", "Arrow")) for name in _variants_of(adapter)):
        raise refused(f"a {name_of(adapter)}, which is another head for every token")


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


def weight_within(adapter: Any) -> Tensor:
    module = adapter
    while not _is_linear(module):
        module = _within(module)
    weight: Tensor = module.weight
    return weight
