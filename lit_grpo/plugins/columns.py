"""The columns of an update: each value that a plug-in may write is declared once, and written in one checked place.

For example::

    COLUMNS["weight"] = Column("trained token", "on_minibatch", Numbers("float32", Limit(ge=0, finite=True)))

    step.set("weight", rollout, [1, 1, -1])
    ValueError: Mine.on_minibatch gives sample (0,) of prompt 'train/0' the weight with -1 at place 2; give a finite
    number of at least 0 for each of its 3 tokens that are trained on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from lit_grpo.compatibility import DENOMINATOR, ENTROPY_COEFFICIENT
from lit_grpo.limits import Limit
from lit_grpo.types import Rollout

if TYPE_CHECKING:
    import torch


Kind = TypeVar("Kind", bound="Method")
FINITE = Limit(finite=True)
LOGPROB = Limit(le=1e-3, finite=True, remedy="a log-prob is not above 0")
"""Bounds of a log-prob; a little above 0 is rounding."""


@dataclass(frozen=True)
class Numbers:
    """Numbers that a plug-in gives: their dtype and range.

    Args:
        dtype: Name of the dtype that the tensor gets, such as ``float32``.
        limit: Bounds of each number.
        nan: Whether NaN is allowed.
    """

    dtype: str
    limit: Limit = FINITE
    nan: bool = False

    def read(
        self, said: str, value: Any, shape: tuple[int, ...], each: str, keeps_gradient: bool = False
    ) -> torch.Tensor:
        """Return a tensor of them, on the host and without a gradient.

        Args:
            said: Beginning of the message: who gives what.
            value: A tensor, an array, a list, or a number.
            shape: Shape that the value must have.
            each: What has one number, for messages.
            keeps_gradient: Whether the tensor stays on its device and keeps its gradient: it is part of a loss.

        Raises:
            ValueError: The shape, the dtype or a number is another one.
        """
        import torch

        bounds = self.limit.text("", float) if self.dtype != "bool" else "a boolean"
        wanted = f"give {bounds} for each of {each}" if shape else f"give {bounds}"
        try:
            numbers = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{said} as {shown(value)}; {wanted}.") from None
        if tuple(numbers.shape) != shape:
            more = f": the shape {shape}" if shape else ""
            raise ValueError(f"{said} of shape {tuple(numbers.shape)}; {wanted}{more}.")
        fits = {
            "bool": numbers.dtype == torch.bool,
            "int64": not (numbers.is_floating_point() or numbers.is_complex()),
        }
        is_switch = numbers.dtype == torch.bool and not shape  # several booleans are taken for 0 and 1
        if numbers.numel() and not fits.get(self.dtype, not (numbers.is_complex() or is_switch)):
            raise ValueError(f"{said} of {numbers.dtype}; {wanted}.")
        if not keeps_gradient:
            numbers = numbers.detach().to("cpu")
        numbers = numbers.to(getattr(torch, self.dtype))
        if self.dtype != "bool" and (wrong := self._wrong(numbers)).any():
            place = wrong.nonzero()[0].tolist()
            where = f" at place {place[0] if len(place) == 1 else tuple(place)}" if place else ""
            raise ValueError(f"{said} with {numbers[tuple(place)].item():g}{where}; {wanted}.")
        return numbers

    def _wrong(self, numbers: torch.Tensor) -> torch.Tensor:
        wrong = numbers.isinf() if self.limit.finite else numbers.new_zeros(numbers.shape).bool()
        if not self.nan:
            wrong = wrong | numbers.isnan()
        for bound, sign in ((self.limit.ge, 1), (self.limit.le, -1)):
            if bound is not None:
                wrong = wrong | (sign * (numbers - bound) < 0)
        return wrong


@dataclass(frozen=True)
class Column:
    """A value that a plug-in may write.

    Args:
        of: What has such a value: a completion, one of its tokens, one that is trained on, or a whole step.
        hook: The hook in which it is written.
        numbers: Dtype and range of the numbers; None for an object, which its reader checks.
        decides: What it decides, for messages as in ``which both decide ...``: at most one plug-in of a run may write
            it, or one for each data set. Empty if several may.
        needs: What writing it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`.
        replaces: What a setting of the run decides otherwise, such as :data:`lit_grpo.compatibility.DENOMINATOR`.
        whole_run: What a plug-in that writes it does, after its name, if that cannot be limited to data sets.
        by_rows: Whether each data set may have a plug-in of its own that writes it.
    """

    of: Literal["completion", "turn", "trained token", "token", "step", "micro-batch token"]
    hook: Literal["on_batch", "on_minibatch", "loss", "on_gradient"]
    numbers: Numbers | None = None
    decides: str = ""
    needs: frozenset[str] = frozenset()
    replaces: str = ""
    whole_run: str = ""
    by_rows: bool = True


_CHOICE, _IMITATION = "which rollouts are trained on", "which tokens have a cross-entropy loss"
_CREDIT, _DENOMINATOR = "what each turn is trained on with", "which log-probs ratios are taken to"
_FURTHER, _TERM = "which further tokens have a loss", "what is added to the objective's loss"
_STEP, _RATIOS = "changes the optimizer step as a whole", "decides what the ratios of all tokens are taken to"
_AGREED = frozenset({"all_ranks"})
COLUMNS: Mapping[str, Column] = {
    # once for a batch, when rollouts have the advantages of the run's estimator
    "old_logprob": Column(
        "trained token",
        "on_batch",
        Numbers("float32", LOGPROB, nan=True),
        _DENOMINATOR,
        replaces=DENOMINATOR,
        whole_run=_RATIOS,
        by_rows=False,
    ),
    "chosen": Column("completion", "on_batch", Numbers("bool"), _CHOICE),
    "advantage": Column("completion", "on_batch", Numbers("float64"), "what each rollout is trained on with"),
    "trained": Column(
        "completion", "on_batch", Numbers("bool"), _CHOICE, whole_run="compares the rollouts of the whole batch"
    ),
    "turn_advantage": Column("turn", "on_batch", Numbers("float32"), _CREDIT),
    "token_advantage": Column("trained token", "on_batch", Numbers("float32"), _CREDIT),
    "epsilon": Column(
        "trained token", "on_batch", Numbers("float32", Limit(ge=0, finite=True)), "where ratios are clipped"
    ),
    "ce_weight": Column("token", "on_batch", Numbers("float32"), _IMITATION, _AGREED),
    "candidates": Column("trained token", "on_batch", None, _FURTHER, _AGREED, by_rows=False),
    # before each optimizer step
    "examples": Column("step", "on_minibatch", None, "which examples are imitated", _AGREED, by_rows=False),
    "mask": Column("trained token", "on_minibatch", Numbers("bool"), _CHOICE, _AGREED),
    "weight": Column("trained token", "on_minibatch", Numbers("float32", Limit(ge=0, finite=True)), _CHOICE),
    "entropy_coefficient": Column(
        "step",
        "on_minibatch",
        Numbers("float64"),
        "how much the entropy bonus counts",
        replaces=ENTROPY_COEFFICIENT,
        whole_run=_STEP,
        by_rows=False,
    ),
    # before each optimizer step, when it is known which rows go through the policy
    "chunks": Column("completion", "on_minibatch", None, "which completions go through the policy in chunks"),
    "term": Column("step", "on_minibatch", None, _TERM, _AGREED, whole_run=_STEP, by_rows=False),
    # at each micro-batch
    "proximal_logprob": Column(
        "micro-batch token",
        "loss",
        Numbers("float32", LOGPROB),
        _DENOMINATOR,
        replaces=DENOMINATOR,
        whole_run=_RATIOS,
        by_rows=False,
    ),
    "added_loss": Column("micro-batch token", "loss", Numbers("float32"), _FURTHER, by_rows=False),
    # when the gradient of a step is complete
    "scale": Column("step", "on_gradient", Numbers("float64", Limit(ge=0, finite=True)), whole_run=_STEP),
}
"""All columns that plug-ins write; a plug-in is called in the place of the first that it writes."""
OF_CANDIDATES = ("candidate_ids", "candidate_values")
"""Columns that ``candidates`` becomes: a value for each candidate of each trained token, shape (num_trained, K), or
(num_trained, K + 1) for values of candidates and of all other tokens together."""
LATE = ("chunks", "term")
"""Columns that are written when it is known which rows of a step go through the policy."""


def in_order(plugins: Sequence[Kind], hook: str) -> list[Kind]:
    """Return plug-ins in the order of the first column that each writes in a hook; those without one come last."""
    places = {name: place for place, name in enumerate(COLUMNS)}

    def turn(plugin: Method) -> int:
        return min((places[name] for name in plugin.writes if COLUMNS[name].hook == hook), default=len(places))

    return sorted(plugins, key=turn)


class Method(Protocol):
    """A :class:`lit_grpo.plugins.Plugin`, as writers of columns know it."""

    writes: ClassVar[frozenset[str]]
    datasets: ClassVar[frozenset[str]]

    @property
    def numbers(self) -> Any:
        """A :class:`lit_grpo.plugins.RunNumbers`."""
        ...


@dataclass(frozen=True)
class Writer:
    """A plug-in that writes in one of its hooks.

    Args:
        plugin: None for code that is no plug-in, which may write every column.
        hook: Name of the hook of :class:`~lit_grpo.plugins.Plugin` that is running.
        rows: The ids of the rollouts that it is given; of none, it may write those of all.
        source: Its number among the plug-ins that write weights of the channel ``ce``.
    """

    plugin: Method | None
    hook: str
    rows: frozenset[int] = frozenset()
    source: int = 0

    @classmethod
    def of(cls, plugin: Method, hook: str, rollouts: Sequence[Rollout], source: int = 0) -> Writer:
        """Return the writer that a plug-in is in a hook which is given these rollouts."""
        return cls(plugin, hook, frozenset(map(id, rollouts)) or frozenset({0}), source)

    def __str__(self) -> str:
        return self.hook if self.plugin is None else f"{type(self.plugin).__name__}.{self.hook}"

    def column(self, name: str) -> Column:
        """Return a column that it may write.

        Raises:
            ValueError: There is no such column in its hook, or the plug-in has not declared that it writes it.
        """
        column = COLUMNS.get(name) if isinstance(name, str) else None
        if column is None or column.hook != self.hook:
            own = [each for each, its in COLUMNS.items() if its.hook == self.hook]
            near = difflib.get_close_matches(str(name), own, 1)
            known = f"the columns of {self.hook} are {', '.join(own)}." if own else f"{self.hook} writes none."
            known = f"did you mean {near[0]!r}?" if near else known
            where = "which is no column" if column is None else f"which is written in {column.hook}"
            raise ValueError(f"{self} writes {shown(name)}, {where}; {known}")
        if self.plugin is not None and name not in self.plugin.writes:
            declared = ", ".join(map(repr, sorted({*self.plugin.writes, name})))
            raise ValueError(
                f"{self} writes {name!r} and does not declare it; set writes = frozenset({{{declared}}}) in the class."
            )
        return column

    def column_of(self, name: str, rollout: Rollout) -> Column:
        """Return a column that it may write for a rollout.

        Raises:
            ValueError: It may not write it, or not for this rollout.
        """
        column = self.column(name)
        if column.of == "step":
            how = "step.add([...])" if name == "examples" else f"step[{name!r}] = ..."
            raise ValueError(f"{self} writes {name!r} of a rollout, and the whole step has one; write {how}.")
        if not isinstance(rollout, Rollout):
            raise ValueError(f"{self} writes {name!r} of {shown(rollout)}; give one of its rollouts.")
        if self.rows and id(rollout) not in self.rows:
            raise ValueError(
                f"{self} writes {name!r} of {row_name(rollout)}, which is not among the rollouts that it is given; "
                "write theirs alone."
            )
        return column

    def read(self, name: str, rollout: Rollout, value: Any) -> Any:
        """Return what it gives a rollout in a column, in the form that the run goes on with.

        Raises:
            ValueError: It may not write that, or the value has another shape, dtype or range; the message names
                plug-in, column and row.
        """
        column, completion = self.column_of(name, rollout), rollout.completion
        if column.numbers is None:
            return value
        number, each = {
            "completion": (None, ""),
            "turn": (len(completion.turns), "turns"),
            "trained token": (completion.num_trained, "tokens that are trained on"),
            "token": (completion.num_tokens, "tokens, observed tokens among them"),
        }[column.of]
        said, shape = f"{self} gives {row_name(rollout)} the {name}", () if number is None else (number,)
        numbers = column.numbers.read(said, value, shape, f"its {number} {each}")
        return numbers if shape else numbers.item()


def row_name(rollout: Rollout) -> str:
    return f"sample {rollout.completion.request.path} of prompt {rollout.prompt.prompt_id!r}"


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    if getattr(value, "shape", None) and hasattr(value, "dtype"):
        return f"numbers of shape {tuple(value.shape)}"
    text = repr(value)
    length = f" ({len(value)} entries)" if is_list(value) else ""
    return (text if len(text) <= 80 else f"{text[:77]}...") + length


def is_list(value: Any) -> bool:
    """Return whether a value has a length and an order: no text, no mapping."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, str | bytes | Mapping)
        and getattr(value, "shape", True) != ()
    )
