"""eyas eval: drafts and baselines, judged on held-out conversations and by decoding, in one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from eyas.shards.dataset import Dataset
from eyas.taps.errors import EyasError, UsageError
from eyas.train.run import init_folder, read_run

if TYPE_CHECKING:
    from eyas.align.engine import Engine
    from eyas.train.acceptance.decoding import Decoding
    from eyas.train.acceptance.held_out import HeldOut
    from eyas.train.acceptance.steps import StepChoice
    from eyas.train.acceptance.target import RunningTarget
    from eyas.train.draft_files import LoadedDraft

DEFAULT_STEPS = 3
UNTRAINED = "untrained draft"


class _Progress(Protocol):
    def update(self, amount: int, note: str = "") -> None: ...


ShowProgress = Callable[[str, "int | None", str], AbstractContextManager[_Progress]]  # description, total, unit


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is judged, and how."""

    drafts: tuple[Path, ...]  # each a run (its best checkpoint), a checkpoint, or a draft's folder
    target: Path | None = None  # None: the first run's
    dataset: Path | None = None
    prompts: Path | None = None
    engine: Engine | None = None  # whose reading of a foreign draft's layer ids counts
    baselines: bool = False
    validation: float | None = None  # share of the dataset that is held out; 0: all; None: as the run, else all
    num_draft: int | None = None  # tokens proposed a cycle; None: what the first draft was trained for
    steps: tuple[int, ...] = ()  # numbers of drafted tokens to choose from; empty: no choice
    verify_ms: Mapping[int, float] | None = None  # of each of ``steps``; None: measured
    draft_ms: float | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    max_prompts: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: str | None = None  # None: the target's
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What the options and the runs amount to, before anything is loaded."""

    folders: dict[str, Path]  # name in the report -> draft folder
    target: Path
    dataset: Path | None  # to be judged on
    counted: Path | None  # what the 2-gram table is made from
    validation: float


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """The result. Dictionaries go by the drafts' names."""

    target: str
    device: str
    dtype: str
    num_draft: int
    held_out: dict[str, HeldOut] = field(default_factory=dict)
    validation: float = 0.0
    decoding: Decoding | None = None
    num_prompts: int = 0
    steps: dict[str, list[StepChoice]] = field(default_factory=dict)
    steps_are_decoded: bool = False  # the acceptances behind ``steps`` are decoding's; else the dataset's

    @property
    def unexplained(self) -> int:
        """Greedy outputs that are not plain decoding's, for another reason than rounding."""
        return 0 if self.decoding is None else sum(len(tally.unexplained) for tally in self.decoding.tallies)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "device": self.device,
            "dtype": self.dtype,
            "num_draft": self.num_draft,
            "held_out": {name: asdict(found) for name, found in self.held_out.items()},
            "validation": self.validation,
            "num_prompts": self.num_prompts,
            "decoding": None if self.decoding is None else self.decoding.to_json(),
            "steps": {name: [asdict(choice) for choice in choices] for name, choices in self.steps.items()},
        }


def resolve(config: EvalConfig) -> Resolved:
    """Raises UsageError where something is needed that neither the options nor a run says."""
    runs = [run for path in config.drafts if (run := _run_of(path)) is not None]
    body = read_run(runs[0]) if runs else None
    target = config.target or (Path(body["target"]) if body else None)
    if target is None:
        raise UsageError("--target is needed: none of these drafts is of a run, which would name it")
    known = Path(body["dataset"]["path"]) if body else None
    dataset = config.dataset
    if dataset is None and config.prompts is None:
        if known is None:
            raise UsageError("nothing to judge on: give --dataset, --decode, or both")
        dataset = known
    counted = dataset or known
    if config.baselines and config.prompts is not None and counted is None:
        raise UsageError("--baselines: the 2-gram table is counted in a dataset: give --dataset")
    validation = config.validation
    if validation is None:
        is_its_own = body is not None and counted is not None and known is not None and _same(counted, known)
        validation = float(body["options"]["validation"]) if body is not None and is_its_own else 0.0
    folders: dict[str, Path] = {}
    for path in config.drafts:
        folder = init_folder(str(path))
        if str(path) in folders:
            raise UsageError(f"{path} is given twice")
        folders[str(path)] = folder
    return Resolved(folders=folders, target=target, dataset=dataset, counted=counted, validation=validation)


def evaluate(config: EvalConfig, resolved: Resolved, show: ShowProgress) -> EvalReport:
    """Judge. Raises EyasError and its kin for drafts, datasets, prompts and targets that do not fit each other."""
    import torch

    from eyas.capture.engines.base import EngineSettings
    from eyas.capture.engines.transformers.engine import pick_device
    from eyas.capture.engines.transformers.load import read_outline

    outline = read_outline(str(resolved.target), trust_remote_code=config.trust_remote_code)
    name = config.dtype or outline.dtype
    device = pick_device(EngineSettings(target=str(resolved.target), taps=(), dtype=name, device=config.device))
    dtype: torch.dtype = getattr(torch, name)
    drafts = _load(config, resolved, outline.hidden_size, device, dtype)
    num_draft = max(config.steps) if config.steps else config.num_draft or _trained_steps(next(iter(drafts.values())))
    held_out: dict[str, HeldOut] = {}
    if resolved.dataset is not None:
        held_out = _held_out(config, resolved, drafts, num_draft, device, dtype, show)
    target = None
    decoding, num_prompts = None, 0
    if config.prompts is not None:
        target = _running_target(config, resolved, drafts, name)
        decoding, num_prompts = _decode(config, resolved, drafts, num_draft, target, show)
    steps = {}
    if config.steps:
        acceptance = (
            {tally.name: tally.acceptance for tally in decoding.tallies}
            if decoding is not None
            else {draft: found.acceptance for draft, found in held_out.items()}
        )
        if target is None and (config.verify_ms is None or config.draft_ms is None):
            target = _running_target(config, resolved, drafts, name)
        steps = {
            draft: _steps(config, draft, loaded, acceptance[draft], target)
            for draft, loaded in drafts.items()
            if draft != UNTRAINED
        }
    return EvalReport(
        target=str(resolved.target),
        device=device.type,
        dtype=name,
        num_draft=num_draft,
        held_out=held_out,
        validation=resolved.validation,
        decoding=decoding,
        num_prompts=num_prompts,
        steps=steps,
        steps_are_decoded=decoding is not None,
    )


def _load(config: EvalConfig, resolved: Resolved, width: int, device: Any, dtype: Any) -> dict[str, LoadedDraft]:
    from eyas.train.acceptance.drafters import untrained
    from eyas.train.draft_files import load_draft

    drafts = {}
    for name, folder in resolved.folders.items():
        draft = load_draft(folder, target=resolved.target, engine=config.engine, device=device, dtype=dtype)
        draft.model.eval().requires_grad_(False)
        if draft.model.shape.target_hidden_size != width:
            raise EyasError(
                f"{folder} is fed taps of width {draft.model.shape.target_hidden_size}, and {resolved.target} has "
                f"hidden size {width}: is it a draft of this target?"
            )
        drafts[name] = draft
    if config.baselines:
        first = next(iter(drafts.values()))
        drafts[UNTRAINED] = replace(first, model=untrained(first.model).eval().requires_grad_(False))
    return drafts


def _held_out(
    config: EvalConfig,
    resolved: Resolved,
    drafts: Mapping[str, LoadedDraft],
    num_steps: int,
    device: Any,
    dtype: Any,
    show: ShowProgress,
) -> dict[str, HeldOut]:
    from eyas.train.acceptance.held_out import evaluate_held_out, held_out_ids

    assert resolved.dataset is not None
    dataset = Dataset.open(resolved.dataset)
    _refuse_other_weights(dataset, resolved.target)
    ids = held_out_ids(dataset, resolved.validation)
    found = {}
    for name, draft in drafts.items():
        with show(f"held out, {name}", len(ids), "samples") as progress:
            found[name] = evaluate_held_out(
                draft,
                dataset,
                ids,
                target=resolved.target,
                num_steps=num_steps,
                device=device,
                dtype=dtype,
                on_progress=progress.update,
            )
    return found


def _refuse_other_weights(dataset: Dataset, target: Path) -> None:
    """States of one model judged by another's lm_head give numbers that mean nothing. Raises EyasError."""
    from eyas.capture.engines.transformers.load import hash_weights

    captured = dataset.identity.target
    given = hash_weights(str(target), None)
    if None not in (captured.weights_hash, given) and captured.weights_hash != given:
        raise EyasError(
            f"{dataset.path} holds states of other weights than those in {target}: give --target the model that was "
            f"captured ({captured.name}), or capture again"
        )


def _running_target(
    config: EvalConfig, resolved: Resolved, drafts: Mapping[str, LoadedDraft], dtype: str
) -> RunningTarget:
    from eyas.train.acceptance.target import RunningTarget

    taps = dict.fromkeys(tap for draft in drafts.values() for tap in draft.taps)
    return RunningTarget(
        str(resolved.target),
        taps=list(taps),
        dtype=dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
    )


def _decode(
    config: EvalConfig,
    resolved: Resolved,
    drafts: Mapping[str, LoadedDraft],
    num_draft: int,
    target: RunningTarget,
    show: ShowProgress,
) -> tuple[Decoding, int]:
    from eyas.train.acceptance.decoding import decode_prompts
    from eyas.train.acceptance.drafters import BigramTable, Drafter
    from eyas.train.acceptance.held_out import held_out_ids
    from eyas.train.acceptance.prompts import Prompts

    assert config.prompts is not None
    prompts = Prompts(
        config.prompts,
        str(resolved.target),
        max_prompts=config.max_prompts,
        revision=None,
        trust_remote_code=config.trust_remote_code,
    )
    drafters: list[Drafter] = [_drafter(name, draft, target) for name, draft in drafts.items()]
    if config.baselines:
        assert resolved.counted is not None
        dataset = Dataset.open(resolved.counted)
        left_out = held_out_ids(dataset, resolved.validation) if resolved.validation else None
        drafters.append(BigramTable.from_dataset(dataset, left_out=left_out))
    with show("decode", len(prompts), "prompts") as progress:
        decoding = decode_prompts(
            target,
            drafters,
            prompts,
            num_draft=num_draft,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=config.seed,
            on_progress=progress.update,
        )
    return decoding, len(prompts)


def _drafter(name: str, draft: LoadedDraft, target: RunningTarget) -> Any:
    import torch

    from eyas.train.acceptance.drafters import DraftHead

    ids = torch.from_numpy(draft.vocabulary.ids).to(target.device)
    return DraftHead(name, draft.model, ids, draft.taps, vocab_size=target.vocab_size)


def _steps(
    config: EvalConfig, name: str, draft: LoadedDraft, acceptance: list[float], target: RunningTarget | None
) -> list[StepChoice]:
    from eyas.train.acceptance.steps import Costs, choose_steps, measure_costs

    verify_ms, draft_ms = config.verify_ms, config.draft_ms
    if verify_ms is None or draft_ms is None:
        assert target is not None
        measured = measure_costs(target, _drafter(name, draft, target), config.steps)
        verify_ms = measured.verify_ms if verify_ms is None else verify_ms
        draft_ms = measured.draft_ms if draft_ms is None else draft_ms
    return choose_steps(config.steps, acceptance, Costs(dict(verify_ms), draft_ms))


def _trained_steps(draft: LoadedDraft) -> int:
    own = draft.config.raw.get("eyas")
    steps = own.get("ttt_steps") if isinstance(own, Mapping) else None
    return steps if isinstance(steps, int) and steps > 0 else DEFAULT_STEPS


def _run_of(path: Path) -> Path | None:
    """The run that ``path``, a run, a checkpoint or a checkpoint's draft, belongs to."""
    parents = path.absolute().parents
    for folder in (path, *parents[1:3]):
        if (folder / "run.json").is_file():
            return folder
    return None


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
