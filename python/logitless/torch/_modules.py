# SPDX-License-Identifier: Apache-2.0
"""The losses as modules. They hold plain options: deepcopy, pickle and state_dict just work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import functional

from logitless._call import EmptyMean, Reduction, is_flat
from logitless._errors import invalid, not_supported, renames, wrong_dtype
from logitless.torch import _vocabulary
from logitless.torch._autograd import MainGrad
from logitless.torch._checks import check_tensor
from logitless.torch._functions import (
    Statistics,
    _autocast_dtype,
    _result,
    cross_entropy,
    linear_cross_entropy,
    linear_outputs,
    passes_on,
    wanted_of,
)
from logitless.torch._run import LOSS
from logitless.torch._split.given import Split

if TYPE_CHECKING:
    from typing import Literal

    from typing_extensions import Unpack

    from logitless import _call
    from logitless._statistics import StatisticName

    ModuleOptions: TypeAlias = _call.ModuleOptions[Tensor]
    LinearModuleOptions: TypeAlias = _call.LinearModuleOptions[Tensor]

    class HeadOptions(_call.LinearModuleOptions[Tensor], total=False):
        weight: Tensor | None
        reduction: Reduction
        grad_accumulation: Literal["main_grad"] | None


R = TypeVar("R")


class Options(torch.nn.Module):
    """A module with options and no parameters; options that are tensors are buffers."""

    _names: tuple[str, ...]  # the options

    def hold_temperature(self, name: str, value: float | Tensor | None) -> None:
        if isinstance(value, Tensor):  # moves with the module, but is no parameter
            self.register_buffer(name, value, persistent=False)
        else:
            setattr(self, name, value)

    def _options(self, temperature: float | Tensor | None = None) -> dict[str, Any]:
        """The options, with `temperature` in place of the module's if it is given."""
        options = {name: getattr(self, name) for name in self._names}
        if temperature is not None:
            options["temperature"] = temperature
        return options

    def extra_repr(self) -> str:
        """The options, for print()."""
        options = self._options().items()
        given = {k: v for k, v in options if k != "weight" and not isinstance(v, Tensor)}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Class weights and temperatures move with the module to another device, but keep their
        dtype (0.7 is not a bf16 number), and keep their values in to_empty(). Moved from the meta
        device, where they have no values, they and the loss are NaN until someone writes them.
        Lists of ids move in the same way; from the meta device they hold -1."""
        held = dict(self._buffers)
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in held.items():
            now = self._buffers[name]
            if before is None or now is None:
                continue
            if not before.is_meta:
                self._buffers[name] = before.to(now.device)
            elif not now.is_meta:
                # -1 is an absent id; NaN makes the loss NaN until values are written
                none = float("nan") if before.is_floating_point() else -1
                self._buffers[name] = torch.full_like(now, none, dtype=before.dtype)
        return moved


class _Loss(Options, Generic[R]):
    """The options that both loss modules have. R is the type that a call returns: Tensor, or with
    statistics (Tensor, Statistics)."""

    weight: Tensor | None
    temperature: float | Tensor
    _names: tuple[str, ...] = (
        "weight", "reduction", "ignore_index", "label_smoothing", "z_loss", "logit_scale",
        "softcap", "temperature", "return_statistics", "empty_mean",
    )  # fmt: skip

    def __init__(
        self,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = 0.0,
        temperature: float | Tensor = 1.0,
        return_statistics: Any = (),
        empty_mean: EmptyMean = "zero",
    ) -> None:
        super().__init__()
        if weight is not None:
            self._check_weight(weight)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.hold_temperature("temperature", temperature)
        one = isinstance(return_statistics, str)
        self.return_statistics = (return_statistics,) if one else tuple(return_statistics)
        self.empty_mean = empty_mean

    def _check_weight(self, weight: Any) -> None:
        check_tensor("weight", weight)


class CrossEntropyLoss(_Loss[R]):
    """`cross_entropy` of given logits [..., V], as a module that holds the options."""

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: CrossEntropyLoss[Tensor], weight: Tensor | None = ...,
            reduction: Reduction = ..., *, return_statistics: tuple[()] = ...,
            **options: Unpack[ModuleOptions],
        ) -> None: ...  # fmt: skip
        @overload
        def __init__(
            self: CrossEntropyLoss[tuple[Tensor, Statistics]], weight: Tensor | None = ...,
            reduction: Reduction = ..., *,
            return_statistics: StatisticName | Sequence[StatisticName],
            **options: Unpack[ModuleOptions],
        ) -> None: ...  # fmt: skip
        def __init__(self, *args: Any, **options: Any) -> None: ...

        def __call__(
            self, logits: Tensor, target: Tensor, *, token_weight: Tensor | None = ...,
            normalizer: float | Tensor | None = ..., temperature: float | Tensor | None = ...,
        ) -> R: ...  # fmt: skip

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Any:
        """`cross_entropy` of `logits` [..., V] and `target` [...] with the module's options. A
        `temperature` given here replaces the module's."""
        return cross_entropy(
            logits, target, token_weight=token_weight, normalizer=normalizer,
            **self._options(temperature),
        )  # fmt: skip


class LinearCrossEntropyLoss(_Loss[R]):
    """`linear_cross_entropy` as a module that holds the options."""

    vocab_ids: Tensor | None
    _names = (*_Loss._names, "shift", "memory", "vocab_ids")

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, linear_weight: Tensor, target: Tensor, *,
            linear_bias: Tensor | None = ..., token_weight: Tensor | None = ...,
            normalizer: float | Tensor | None = ..., temperature: float | Tensor | None = ...,
        ) -> R: ...  # fmt: skip

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor], weight: Tensor | None = ...,
        reduction: Reduction = ..., *, return_statistics: tuple[()] = ...,
        **options: Unpack[LinearModuleOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Statistics]], weight: Tensor | None = ...,
        reduction: Reduction = ..., *,
        return_statistics: StatisticName | Sequence[StatisticName],
        **options: Unpack[LinearModuleOptions],
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = 0.0,
        temperature: float | Tensor = 1.0,
        return_statistics: Any = (),
        empty_mean: EmptyMean = "zero",
        *,
        shift: bool | int = False,
        memory: int | str | None = None,
        vocab_ids: Tensor | None = None,
    ) -> None:
        super().__init__(
            weight, reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap,
            temperature, return_statistics, empty_mean,
        )  # fmt: skip
        self.shift = shift
        self.memory = memory
        self.register_buffer("vocab_ids", vocab_ids, persistent=False)

    def _check_weight(self, weight: Any) -> None:
        if isinstance(weight, int):  # the first argument of torch's module of that name
            raise wrong_dtype(
                f"weight is {weight}; allowed: the classes' weights, a tensor [V], or None. The "
                "module that holds the head, as torch.nn.LinearCrossEntropyLoss(in_features, "
                "num_classes) does, is LinearCrossEntropyHead(in_features, out_features)"
            )
        super()._check_weight(weight)

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Any:
        """`linear_cross_entropy` of these arguments with the module's options. A `temperature`
        given here replaces the module's."""
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            token_weight=token_weight,
            normalizer=normalizer,
            **self._options(temperature),
        )


def _divided(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits [..., V] divided by a temperature: a number, or a tensor as the losses take it."""
    if isinstance(temperature, Tensor):
        tokens = logits.shape[:-1]
        if is_flat(temperature.shape, tokens):
            temperature = temperature.reshape(tokens)
        return (logits / temperature.unsqueeze(-1)).to(logits.dtype)
    return logits / temperature if temperature != 1 else logits


class LinearCrossEntropyHead(torch.nn.Linear, Generic[R]):
    """A language model's head: called with targets it returns the loss, without them the logits.

    It is an nn.Linear that holds the weight. So the hooks of FSDP and DDP run around the loss, a
    weight that is tied to an embedding stays tied, and checkpoints keep their names. The head's own
    tensors are `head.weight` [V, D] and, if there is a bias, `head.bias` [V]. Keywords are
    options of `linear_cross_entropy`; `weight` [V] is the class weights. With `vocab_ids`, logits
    are -inf at all other rows.

    `grad_accumulation="main_grad"`: backward adds the weight's gradient to the f32 tensor
    weight.main_grad (which is created as zeros if it is missing) and does not touch weight.grad.

    `parallelize` splits the vocabulary over the device mesh of tensor parallelism or of data
    parallelism.
    """

    sequence_dim: int | None = None
    local_tokens = False
    param_dtype: torch.dtype | None = None
    gradient_divide_factor: float | None = None
    _split = False  # whether the weight is a DTensor of `parallelize`, not a shard of FSDP's
    _own_tokens = False  # whether each rank has its own tokens: parallelize(tokens="sharded")

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, input: Tensor, target: None = ..., *,
            temperature: float | Tensor | None = ...,
        ) -> Tensor: ...  # fmt: skip
        @overload
        def __call__(
            self, input: Tensor, target: Tensor, *, token_weight: Tensor | None = ...,
            normalizer: float | Tensor | None = ..., temperature: float | Tensor | None = ...,
        ) -> R: ...  # fmt: skip
        def __call__(self, *args: Any, **options: Any) -> Any: ...

    @overload
    def __init__(
        self: LinearCrossEntropyHead[Tensor], in_features: int, out_features: int,
        bias: bool = ..., device: Any = ..., dtype: Any = ..., *,
        return_statistics: tuple[()] = ..., **options: Unpack[HeadOptions],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyHead[tuple[Tensor, Statistics]], in_features: int,
        out_features: int, bias: bool = ..., device: Any = ..., dtype: Any = ..., *,
        return_statistics: StatisticName | Sequence[StatisticName],
        **options: Unpack[HeadOptions],
    ) -> None: ...  # fmt: skip
    @passes_on(LinearCrossEntropyLoss._names, LinearCrossEntropyLoss)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        grad_accumulation: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if grad_accumulation not in (None, "main_grad"):
            raise invalid(f"grad_accumulation is {grad_accumulation!r}; allowed: None, 'main_grad'")
        self.grad_accumulation = grad_accumulation
        self.loss: LinearCrossEntropyLoss[R] = LinearCrossEntropyLoss(**options)
        weight = self.loss.weight
        # The head's checkpoint has the same names as that of the Linear that it replaces.
        self.loss.register_buffer("weight", weight, persistent=False)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        """Loads class weights from older checkpoints, which included them."""
        name = f"{prefix}loss.weight"
        own = self.loss.weight
        if name in state_dict and own is not None:
            saved = state_dict.pop(name)
            if saved.shape == own.shape and own.is_meta:
                self.loss.weight = saved.detach().clone()
            elif saved.shape == own.shape:
                own.copy_(saved.detach())
            else:
                rest[-1].append(
                    f"{name} has shape {tuple(saved.shape)}; allowed: {tuple(own.shape)}, that of "
                    "the head's class weights"
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    @overload
    @classmethod
    def from_linear(  # type: ignore[overload-overlap]  # () asks for nothing
        cls, linear: torch.nn.Linear, *, return_statistics: tuple[()] = ...,
        **options: Unpack[HeadOptions],
    ) -> LinearCrossEntropyHead[Tensor]: ...  # fmt: skip
    @overload
    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *,
        return_statistics: StatisticName | Sequence[StatisticName],
        **options: Unpack[HeadOptions],
    ) -> LinearCrossEntropyHead[tuple[Tensor, Statistics]]: ...  # fmt: skip
    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> LinearCrossEntropyHead[Any]:
        """A head that shares the parameters of `linear`; `options` are the head's. Raises
        LogitlessTypeError if the weight of `linear` is no tensor, as in a quantized layer."""
        if not isinstance(getattr(linear, "weight", None), Tensor):  # it may be a method
            raise wrong_dtype(
                f"linear is a {type(linear).__module__}.{type(linear).__name__}, whose weight is "
                "no tensor; allowed: a torch.nn.Linear"
            )
        head = cls(
            linear.in_features, linear.out_features, linear.bias is not None, "meta",
            linear.weight.dtype, **options,
        )  # fmt: skip
        head.weight, head.bias = linear.weight, linear.bias
        return head.train(linear.training)

    @renames({"linear_weight": "head.weight", "linear_bias": "head.bias"})
    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> Any:
        """The loss of `input` [..., D] and `target` [...], or without a target the logits [..., V],
        with the head's options. A `temperature` given here replaces the head's. `token_weight` and
        `normalizer` are as in `linear_cross_entropy`."""
        if target is None:
            self._check_no_target()
            loss = self.loss
            z = self._products(input) * loss.logit_scale
            if loss.softcap is not None and loss.softcap > 0:
                z = torch.tanh(z / loss.softcap) * loss.softcap
            if loss.vocab_ids is not None:
                _vocabulary.check_list("vocab_ids", loss.vocab_ids, z.shape[-1], self.weight)
                listed, _, wrong = _vocabulary.sorted_ids("vocab_ids", loss.vocab_ids, z.shape[-1])
                others = torch.ones(z.shape[-1], dtype=torch.bool, device=z.device)
                z = z.masked_fill(others.index_fill(0, listed, False), -math.inf)
                z = z.masked_fill(wrong, math.nan)
            return _divided(z, loss.temperature if temperature is None else temperature)
        options = self.loss._options(temperature)
        names = options.pop("return_statistics")
        outputs = linear_outputs(
            input,
            self.weight,
            target,
            LOSS,
            self.bias,
            token_weight=token_weight,
            normalizer=normalizer,
            main_grad=self._main_grad(),
            asked=lambda: wanted_of(names),
            **self._place(input, target),
            **options,
        )
        return _result(outputs, names)

    def parallelize(
        self,
        mesh: Any,
        *,
        sequence_dim: int | None = None,
        local_tokens: bool = False,
        src_data_rank: int | None = 0,
        tokens: str = "replicated",
        param_dtype: torch.dtype | None = None,
        gradient_divide_factor: float | None = None,
    ) -> LinearCrossEntropyHead[R]:
        """Splits the vocabulary over a device mesh of one dimension (for `tokens="sharded"` also
        two), and returns the head. docs/devices.md has examples.

        Weight and bias become new DTensor parameters, Shard(0). Call this before the optimizer is
        made and before FSDP wraps the head; if the weight was tied to an embedding, tie it anew
        afterwards. `src_data_rank`: the rank of the mesh whose values are distributed; None: each
        rank cuts its part from its own values, as in torch's parallelize_module.

        `tokens="replicated"` is for tensor parallelism. With a target, forward returns the loss
        over the whole vocabulary, a plain tensor with the same bits on every rank. Its upstream
        gradient must be the same on every rank too: do not sum it or divide it by the number of
        ranks. Without a target, in eval mode or under no_grad, forward returns all logits of all
        tokens.

        - Hidden states are the same on every rank or, with `sequence_dim`, split along that
          dimension of tokens. For a DTensor its placements decide instead.
        - Targets and results are those of all tokens or, with `local_tokens`, the rank's own.

        `tokens="sharded"` is for data parallelism: the mesh has one dimension, or two (replicas,
        shards), as for fully_shard. The head is called as under FSDP2, with each rank's own input
        [..., D] and target [...], and returns the rank's own loss and statistics; the gradient of
        the input is the rank's own, too. The weight stays sharded. Its gradient is that of FSDP2:
        the mean, over the ranks, of the gradients of their losses.

        - All ranks must have the same number of tokens (otherwise the CPU raises an error): pad
          with ignored tokens.
        - Without a target, under no_grad, the weight is gathered, and forward returns the logits of
          the rank's own tokens.
        - Keep the head out of FSDP:
          `fully_shard(model, ignored_params=set(head.parameters()))`.
        - `param_dtype`: the dtype of the products, as in MixedPrecisionPolicy; under autocast,
          autocast's dtype is used. Forward and backward each cast an f32 weight.
        - `gradient_divide_factor`: divides the sum of the ranks' gradients instead of the number of
          ranks, as FSDP2's set_gradient_divide_factor.
        - A weight that another module has too (tied embeddings) raises LogitlessNotSupportedError,
          which is a NotImplementedError.

        Raises LogitlessValueError for a mesh or options that do not fit together, and for a head
        whose parameters are DTensors already.
        """
        from logitless.torch import parallel

        if local_tokens and sequence_dim is None:
            raise invalid("local_tokens is True without sequence_dim; every rank has all tokens")
        if tokens not in ("replicated", "sharded"):
            raise invalid(f"tokens is {tokens!r}; allowed: 'replicated', 'sharded'")
        own = tokens == "sharded"
        if own and sequence_dim is not None:
            raise invalid(
                "sequence_dim is given with tokens='sharded', where a rank's tokens are its own"
            )
        if not own and (param_dtype is not None or gradient_divide_factor is not None):
            name = "gradient_divide_factor" if param_dtype is None else "param_dtype"
            raise invalid(f"{name} is given without tokens='sharded'; FSDP's is its own")
        if gradient_divide_factor is not None and not gradient_divide_factor > 0:
            raise invalid(f"gradient_divide_factor is {gradient_divide_factor}; allowed: > 0")
        parallel.split_rows(self, mesh, src_data_rank, own)
        self.sequence_dim, self.local_tokens, self._split = sequence_dim, local_tokens, True
        self.param_dtype, self.gradient_divide_factor = param_dtype, gradient_divide_factor
        self._own_tokens = own
        return self

    def _place(self, input: Any, target: Any) -> dict[str, Any]:
        """The arguments of the loss that describe how the vocabulary is split. Raises for a weight
        that FSDP has sharded."""
        if self._own_tokens:
            return self._data_options(input, target)
        if not hasattr(self.weight, "placements"):
            return {}
        if not self._split:
            raise not_supported(
                "the head's weight is sharded, and not by its parallelize or by "
                "logitless.torch.parallel.HeadParallel; allowed: these for tensor parallelism (not "
                "ColwiseParallel); under FSDP, to call the head itself, before which FSDP gathers "
                "it"
            )
        from logitless.torch._split import placed

        group = placed.group_of(self.weight)
        if hasattr(input, "placements"):  # a DTensor's placements say whether it is split
            return {"group": group}
        split = Split(group, sequence_dim=self.sequence_dim, local_tokens=self.local_tokens)
        return {"group": split}

    def _data_options(self, input: Any, target: Any) -> dict[str, Any]:
        """The arguments of _place if each rank has its own tokens."""
        from logitless.torch._split import placed

        weight: Any = self.weight
        if not placed.is_placed(weight):
            raise not_supported(
                "the head's weight is a plain tensor after parallelize(tokens='sharded'), as of "
                "tying it again; allowed: the DTensor of parallelize, whose gradient is the mean "
                "of the ranks'"
            )
        for name, tensor in (("input", input), ("target", target)):
            if placed.is_placed(tensor):
                raise not_supported(
                    f"{name} is a DTensor and the head's tokens are sharded; allowed: a plain "
                    "tensor of the rank's own tokens, as of to_local()"
                )
        dtype, factor = self._product_dtype(input), self.gradient_divide_factor
        data = placed.data_of(weight, dtype, factor)
        return {"group": placed.group_of(weight), "data": data}

    def _product_dtype(self, input: Tensor) -> torch.dtype | None:
        return _autocast_dtype(input) or self.param_dtype

    def _products(self, input: Tensor) -> Tensor:
        """input @ weight.T + bias, of all columns."""
        if not self._split or not hasattr(self.weight, "placements"):
            return functional.linear(input, self.weight, self.bias)
        from logitless.torch._split import placed

        if self._own_tokens:
            dtype = self._product_dtype(input)
            return placed.own_logits(input, self.weight, self.bias, dtype)
        return placed.whole_logits(input, self.weight, self.bias, self.sequence_dim)

    def _check_no_target(self) -> None:
        """Refuses logits from a sharded head in training: most likely a target was given and
        lost."""
        if self._own_tokens:
            if torch.is_grad_enabled() and self.weight.requires_grad:
                raise not_supported(
                    "target is None and the head's tokens are sharded, where logits have no "
                    "gradient of the weight; allowed: a target, or no_grad"
                )
            return
        if self.training and torch.is_grad_enabled() and hasattr(self.weight, "placements"):
            raise not_supported(
                "target is None and the head's weight is sharded by tensor parallelism, whose "
                "ColwiseParallel hands on the first argument alone; allowed in training: a target, "
                "with logitless.torch.parallel.HeadParallel in the parallelize plan (for logits: "
                "eval mode or no_grad)"
            )

    def _main_grad(self) -> MainGrad | None:
        weight: Any = self.weight
        wanted = weight.requires_grad and torch.is_grad_enabled()
        if self.grad_accumulation is None or not wanted:
            return None
        if getattr(weight, "main_grad", None) is None:
            with torch.inference_mode(False):  # an inference tensor could not be changed later
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        buffer: Tensor = weight.main_grad
        if buffer.dtype is not torch.float32 or buffer.shape != weight.shape:
            raise invalid(
                f"weight.main_grad is {str(buffer.dtype)[6:]} of shape {tuple(buffer.shape)}; "
                f"allowed: float32 of {tuple(weight.shape)}"
            )
        return MainGrad(weight, buffer)
