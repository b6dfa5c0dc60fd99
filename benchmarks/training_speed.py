"""Is training as fast as the Hugging Face Trainer with the same model, data and batches?

    python benchmarks/training_speed.py

Writes ``training_speed.json`` and ``training_speed.md``. Three loops take the same steps, with the same initial
weights, batches, optimiser, learning rates and clipping: `train-predictor` (Lightning, its loggers and callbacks),
``transformers.Trainer``, and a bare loop, which is what the model itself costs. They run in turn, several rounds;
their last losses are compared, so that all do the same work.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from benchmarks import common
from benchmarks.training_memory import EMBEDDING_SIZE, SPEC, write_store
from ecospec.train.config import TrainPredictorConfig

KINDS = ("train-predictor", "transformers.Trainer", "bare loop")
#: Largest difference between the last losses of two loops.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSpeedConfig:
    """Tokens a second of training beside the Hugging Face Trainer."""

    steps: int = 10
    """Measured steps of each loop in a round."""
    warmup_steps: int = 2
    """Steps before them."""
    rounds: int = 3
    """Times each loop runs."""
    context_length: int = 256
    """Longest window, in tokens."""
    batch_tokens: int = 2048
    """Positions of a batch, padding included."""
    preset: str = "tiny"
    """Backbone."""
    backbone: dict[str, Any] | None = None
    """Changes to the preset."""
    device: str = "cpu"
    """Device: cpu, cuda."""
    out: Path = common.RESULTS
    """Folder of the results; earlier ones are replaced."""
    seed: int = 0
    """Seed of traces, weights and order."""
    threads: int = 1
    """CPU threads."""
    allow_load: bool = False
    """Measure although other work runs; the page then says so."""

    def __post_init__(self) -> None:
        """Validate the counts."""
        for name in ("steps", "warmup_steps", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")


class Clock:
    """Seconds of the measured steps; waits for the device at both ends."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.start = self.seconds = 0.0

    def after(self, step: int) -> None:
        """Note the time if ``step`` steps are the warm-up's, or all."""
        import torch  # noqa: PLC0415 - the script's help needs none of it

        if step not in (self.first, self.last):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == self.first:
            self.start = now
        else:
            self.seconds = now - self.start


def run(config: TrainingSpeedConfig) -> None:
    """Measure and write the two files."""
    conditions = common.prepare(threads=config.threads, allow_load=config.allow_load, device=config.device)
    runs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Work(config, Path(folder))
        loops = dict(zip(KINDS, (work.ours, work.hugging_face, work.bare), strict=True))
        for number in range(config.rounds):
            for kind, loop in loops.items():
                seconds, losses[kind] = loop()
                runs[kind].append(work.tokens / seconds)
                print(f"round {number + 1} {kind}: {runs[kind][-1]:,.0f} tokens/s", flush=True)
    speeds = {kind: statistics.median(values) for kind, values in runs.items()}
    difference = max(losses.values()) - min(losses.values())
    results = {
        "tokens_per_second": runs,
        "median_tokens_per_second": speeds,
        "last_loss": losses,
        "largest_loss_difference": difference,
        "same_work": difference <= TOLERANCE,
        "ratio_to_hugging_face": speeds[KINDS[0]] / speeds[KINDS[1]],
    }
    common.write_json(
        config.out / "training_speed.json", common.result("training_speed", conditions, config, results)
    )
    parts = _page(config, work, results)
    common.write_page(config.out / "training_speed.md", "Speed of training", conditions, parts)
    print("\n\n".join(parts))


class Work:
    """Model, data and options that the loops share.

    Args:
        config: Options of the benchmark.
        folder: For the store and the runs.
    """

    def __init__(self, config: TrainingSpeedConfig, folder: Path) -> None:
        import torch  # noqa: PLC0415

        from ecospec.train.run_data import prepare_data  # noqa: PLC0415

        self.config = config
        self.folder = folder
        self.total = config.warmup_steps + config.steps
        positions = (self.total + 4) * config.batch_tokens * 2
        write_store(folder / "store", max(40_000, positions), config.seed)
        self.options = TrainPredictorConfig(
            target=Path("synthetic"),
            traces=str(folder / "store"),
            out=folder / "run",
            preset=config.preset,
            backbone=config.backbone,
            context_length=config.context_length,
            batch_tokens=config.batch_tokens,
            max_epochs=1,
            calibration_fraction=0.0,
            baseline_tokens=1000,
            device=config.device,
            dtype="bfloat16" if config.device.startswith("cuda") else "float32",
            seed=config.seed,
            checkpoint_every_minutes=None,
            trainer={"limit_train_batches": self.total, "limit_val_batches": 0},
        )
        self.data = prepare_data(self.options, SPEC)
        self.table = torch.randn(SPEC.vocab_size, EMBEDDING_SIZE, device=config.device)
        self.runs = 0
        from ecospec.train.data import BatchDataset  # noqa: PLC0415

        plan, source = self.data.module.training_plan(0), self.data.module.training
        if len(plan) < self.total:
            raise ValueError(f"the synthetic store has {len(plan)} batches, {self.total} are needed")
        self.batches = BatchDataset(plan, source)
        measured = range(config.warmup_steps, self.total)
        self.tokens = sum(int(self.batches[index]["mask"].sum()) for index in measured)

    def model(self) -> Any:
        """The network with its initial weights."""
        import torch  # noqa: PLC0415

        from ecospec.predictor.backbones import BACKBONE_PRESETS  # noqa: PLC0415
        from ecospec.predictor.model import RoutingPredictorModel  # noqa: PLC0415

        torch.manual_seed(self.config.seed)
        backbone = {**BACKBONE_PRESETS[self.config.preset], **(self.config.backbone or {})}
        model = RoutingPredictorModel(
            SPEC, backbone=backbone, embedding_size=EMBEDDING_SIZE, target_embedding=self.table
        )
        return model.train()

    def clock(self) -> Clock:
        """A clock for one run."""
        return Clock(self.config.warmup_steps, self.total)

    def factor(self, step: int) -> float:
        """Factor on the learning rates at a step, as `train-predictor` sets it."""
        from ecospec.train.schedule import learning_rate_factor  # noqa: PLC0415

        return learning_rate_factor(step / self.total, self.options.warmup)

    def optimizer(self, model: Any) -> Any:
        """The optimiser of `train-predictor`."""
        from ecospec.train.optimizer import MuonAdamW, parameter_groups  # noqa: PLC0415

        return MuonAdamW(parameter_groups(model, self.options), betas=(0.9, self.options.beta2))

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Loss as `train-predictor` weighs it, and the mean over the batch's tokens."""
        from ecospec.train.losses import selected_expert_cross_entropy  # noqa: PLC0415

        loss = selected_expert_cross_entropy(model(batch["input_ids"]), batch["experts"], batch["mask"])
        return loss * (batch["mask"].sum() / self.config.batch_tokens), loss.detach()

    def ours(self) -> tuple[float, float]:
        """`train-predictor`'s own Trainer and module; seconds and last loss."""
        from lightning.pytorch import Callback  # noqa: PLC0415

        from ecospec.cli.training_lines import quiet_lightning  # noqa: PLC0415
        from ecospec.train.checkpoints import ResumePoint  # noqa: PLC0415
        from ecospec.train.module import RoutingPredictorModule  # noqa: PLC0415
        from ecospec.train.trainer import build_trainer  # noqa: PLC0415

        clock, last = self.clock(), [0.0]

        class Timed(Callback):
            def on_train_batch_end(self, trainer: Any, *hook: Any) -> None:
                batch_idx = hook[-1]
                clock.after(batch_idx + 1)
                if batch_idx + 1 == clock.last:
                    last[0] = float(trainer.callback_metrics["train_loss"])

        quiet_lightning()
        self.runs += 1
        options = dataclasses.replace(self.options, out=self.folder / f"run{self.runs}")
        module = RoutingPredictorModule(self.model(), options, {})
        resume = ResumePoint(self.data.module, options.out / "last.ckpt", None, None)
        trainer = build_trainer(options, [resume, Timed()], checkpoints=False)
        self.data.module.mark(0, 0)
        trainer.fit(module, datamodule=self.data.module)
        return clock.seconds, last[0]

    def hugging_face(self) -> tuple[float, float]:
        """``transformers.Trainer``; seconds and last loss."""
        import torch  # noqa: PLC0415
        from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415

        clock, last, work = self.clock(), [torch.zeros(())], self

        class Network(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = work.model()

            def forward(self, **batch: Any) -> dict[str, Any]:
                weighed, last[0] = work.loss(self.network, batch)
                return {"loss": weighed}

        class Timed(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
                clock.after(state.global_step)

        class InOrder(Trainer):  # type: ignore[misc, unused-ignore]
            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(work.batches)

        network = Network()
        optimizer = self.optimizer(network.network)
        arguments = TrainingArguments(
            output_dir=str(self.folder / "hf"),
            per_device_train_batch_size=1,
            max_steps=self.total,
            max_grad_norm=self.options.gradient_clip,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=self.config.device == "cpu",
            bf16=self.config.device.startswith("cuda"),
        )
        trainer = InOrder(
            model=network,
            args=arguments,
            train_dataset=self.batches,
            data_collator=lambda items: items[0],  # an item is a batch already
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)),
            callbacks=[Timed()],
        )
        trainer.train()
        return clock.seconds, float(last[0])

    def bare(self) -> tuple[float, float]:
        """Forward, backward, clip and step, and nothing else; seconds and last loss."""
        import torch  # noqa: PLC0415

        clock, device = self.clock(), torch.device(self.config.device)
        model = self.model().to(device)
        optimizer = self.optimizer(model)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        last = torch.zeros(())
        for step in range(self.total):
            batch = {name: value.to(device, non_blocking=True) for name, value in self.batches[step].items()}
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * self.factor(step)
            with autocast:
                weighed, last = self.loss(model, batch)
            weighed.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.options.gradient_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.after(step + 1)
        return clock.seconds, float(last)


def _page(config: TrainingSpeedConfig, work: Work, results: Mapping[str, Any]) -> list[str]:
    """Paragraphs and table of the page."""
    setting = (
        f"Backbone `{config.preset}` on synthetic traces (6 MoE layers, 64 experts, top-4): {config.rounds} rounds "
        f"in turn, each of {config.warmup_steps} steps to warm up and {config.steps} measured ones of at most "
        f"{config.batch_tokens} positions ({work.tokens:,} tokens that count). Same initial weights, batches, "
        "optimiser (Muon and AdamW), learning rates and clipping; the last losses differ by "
        f"{results['largest_loss_difference']:.1e} (asked for: at most {TOLERANCE:.0e}). `train-predictor` writes "
        "its CSV and TensorBoard logs; neither writes checkpoints. `bare loop`: forward, backward, clip, step. "
        f"`train-predictor` over `transformers.Trainer`: {results['ratio_to_hugging_face']:.3f}."
    )
    bare = results["median_tokens_per_second"]["bare loop"]
    rows = [
        [kind, round(results["median_tokens_per_second"][kind]), round(min(values)), round(max(values)),
         round(results["median_tokens_per_second"][kind] / bare, 3), round(results["last_loss"][kind], 5)]
        for kind, values in results["tokens_per_second"].items()
    ]  # fmt: skip
    headers = ["loop", "tokens/s, median", "least", "most", "over the bare loop", "last loss"]
    return [setting, common.markdown_table(headers, rows)]


if __name__ == "__main__":
    common.run_script(TrainingSpeedConfig, run)
