"""The recipe of the demo target: fast experts, data order, exact resume, the stage and its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from checkpoints.recipe import __main__ as command
from checkpoints.recipe import backbone, target, tokenizer
from checkpoints.recipe.corpus import make_manifest
from checkpoints.recipe.experts import chunked_cross_entropy, use_sorted_experts
from checkpoints.recipe.language_training import TrainingConfig, learning_rate_factor, train
from checkpoints.recipe.settings import END_OF_TEXT, Settings
from checkpoints.recipe.stages import Stage
from checkpoints.recipe.target_data import Phase, TargetData, held_out_windows, plan_batches
from checkpoints.recipe.target_measures import independent_union, layer_routing, measure_text
from checkpoints.recipe.target_training import TargetModule, load_balancing_loss
from ecospec.trace_collection.groups_manifest import GroupsManifest
from ecospec.trace_collection.stdlib_corpus import Document, documents_of

VOCAB, EXPERTS, TOP_K = 64, 8, 2
PHASES = (Phase(5, 16), Phase(3, 32))
CONFIG = TrainingConfig(total_steps=8, tokens_per_batch=128, warmup_steps=2, checkpoint_every=3, validate_every=2)


def tiny_config(vocab_size: int = VOCAB, **changes: Any) -> Qwen3MoeConfig:
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
    return Qwen3MoeConfig(**(values | changes))


@pytest.fixture
def texts() -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, size=size, dtype=np.int32) for size in (120, 300, 77, 210)]


def tiny_run(texts: list[NDArray[np.int32]]) -> tuple[TargetModule, TargetData]:
    module = TargetModule(target.new_target(tiny_config(), seed=1), CONFIG)
    batches = plan_batches(texts, PHASES, CONFIG.tokens_per_batch, seed=2)
    return module, TargetData(batches, held_out_windows(texts, 16, 8, seed=3))


def test_sorted_experts_equal_the_models_own() -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_config()).double()
    ids = torch.randint(0, VOCAB, (2, 9))
    results = []
    for select in (lambda: model.set_experts_implementation("eager"), lambda: use_sorted_experts(model)):
        select()
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (loss_a, grads_a), (loss_b, grads_b) = results
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-12, atol=1e-12)
    for name, grad in grads_a.items():
        torch.testing.assert_close(grad, grads_b[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_chunked_cross_entropy_equals_torch(chunk: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 11, (7,))
    pairs = []
    for loss_of in (
        lambda h, w: F.cross_entropy(h @ w.t(), labels),
        lambda h, w: chunked_cross_entropy(h, w, labels, chunk),
    ):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
        weight = torch.randn(11, 5, dtype=torch.float64, generator=generator, requires_grad=True)
        loss = 3 * loss_of(hidden, weight)
        loss.backward()
        pairs.append((loss.detach(), hidden.grad, weight.grad))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_batches_depend_on_the_seed_only(texts: list[NDArray[np.int32]]) -> None:
    first, again, other = (plan_batches(texts, PHASES, 128, seed) for seed in (0, 0, 1))
    assert [batch.shape for batch in first] == [(8, 17)] * 5 + [(4, 33)] * 3
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_one_epoch_shows_every_token_about_once() -> None:
    stream = [np.arange(1000, dtype=np.int32)]
    windows = held_out_windows(stream, 10, 10_000, seed=0)
    predicted = windows[:, 1:].flatten()
    assert len(predicted) == len(set(predicted.tolist()))
    assert len(predicted) > 970
    assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)


def test_load_balancing_loss_is_top_k_at_balance_and_grows_with_skew() -> None:
    even = torch.eye(EXPERTS).roll(1, 0) + torch.eye(EXPERTS)
    loss, load = load_balancing_loss(even * 5, TOP_K)
    assert float(loss) == pytest.approx(TOP_K)
    assert load.tolist() == pytest.approx([TOP_K / EXPERTS] * EXPERTS)
    skewed, load = load_balancing_loss(torch.arange(EXPERTS).float().repeat(5, 1), TOP_K)
    assert float(skewed) > 2 * TOP_K
    assert load.tolist() == [0.0] * (EXPERTS - TOP_K) + [1.0] * TOP_K


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    factors = [learning_rate_factor(step, CONFIG) for step in range(CONFIG.total_steps + 1)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert factors[-1] == pytest.approx(0)


class _KilledError(RuntimeError):
    pass


class _DiesAtStep(TargetModule):
    fatal_step = 5

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.fatal_step:
            raise _KilledError
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore")
def test_killed_and_resumed_equals_uninterrupted(texts: list[NDArray[np.int32]], tmp_path: Path) -> None:
    whole, data = tiny_run(texts)
    curve = train(whole, data, tmp_path / "whole").curve
    assert [step for step, _ in curve] == [2, 4, 6, 8]

    module, data = tiny_run(texts)
    dying = _DiesAtStep(module.model, CONFIG)
    with pytest.raises(_KilledError):
        train(dying, data, tmp_path / "parts")
    resumed, data = tiny_run(texts)
    progress = train(resumed, data, tmp_path / "parts")

    assert data.start == 3  # the last checkpoint before the kill
    assert [step for step, _ in progress.curve] == [2, 4, 6, 8]
    assert progress.curve == curve
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name

    before = {name: value.clone() for name, value in resumed.state_dict().items()}
    finished, data = tiny_run(texts)
    assert train(finished, data, tmp_path / "parts").seconds == pytest.approx(progress.seconds, abs=0.5)
    assert all(torch.equal(value, before[name]) for name, value in finished.state_dict().items())


def test_layer_routing_counts_what_sets_count() -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(EXPERTS - 1)[:TOP_K] for _ in range(3 * 10)]).reshape(3, 10, TOP_K)
    routing = layer_routing(ids, EXPERTS)
    unions = [len(set(ids[s, t : t + 4].reshape(-1).tolist())) for s in range(3) for t in range(7)]
    assert routing.union == pytest.approx(np.mean(unions))
    assert routing.dead_experts == 1
    assert routing.effective_experts == pytest.approx(2**routing.entropy_bits)
    assert 6 < routing.effective_experts <= 7
    assert independent_union(64, 4, 4) == pytest.approx(64 * (1 - (15 / 16) ** 4))


def test_measured_loss_is_the_models_own(texts: list[NDArray[np.int32]]) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_config()).eval()
    measures = measure_text(model, texts, num_bytes=1000, length=32, batch=3)
    stream = torch.from_numpy(np.concatenate(texts).astype(np.int64))
    windows = torch.stack([stream[s : s + 33] for s in range(0, len(stream) - 33, 32)])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    assert measures.tokens == windows[:, 1:].numel()
    assert measures.loss == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())))
    assert measures.bits_per_byte == pytest.approx(measures.loss / np.log(2) * len(stream) / 1000)


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents per split and a model of two tiny layers: the stages run in seconds."""

    def few(manifest: GroupsManifest, split: str, datasets: Any = None) -> list[Document]:
        wanted = documents_of(manifest, split, datasets, minimum_coverage=0)
        return sorted(wanted, key=lambda document: (abs(len(document.text) - 3000), document.group_id))[:2]

    monkeypatch.setattr(target, "documents_of", few)
    monkeypatch.setattr(tokenizer, "documents_of", few)
    monkeypatch.setattr(backbone, "documents_of", few)
    monkeypatch.setattr(
        target, "target_config", lambda fast: tiny_config(len(fast), eos_token_id=fast.eos_token_id)
    )
    monkeypatch.setattr(target, "keep_freed_memory", lambda: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small_corpus")
def test_stages_write_a_loadable_target_with_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(tmp_path / "out", tmp_path / "work", threads=1, seed=0)
    make_manifest(settings)
    tokenizer.make_tokenizer(settings)
    assert not target.target_complete(settings)
    target.make_target(settings, phases=(Phase(2, 64), Phase(1, 128)))
    assert target.target_complete(settings)

    model = AutoModelForCausalLM.from_pretrained(settings.target)
    assert model.dtype == torch.bfloat16
    fast = AutoTokenizer.from_pretrained(settings.target)
    assert fast.decode(fast("def f(x):\n    return x").input_ids) == "def f(x):\n    return x"
    assert fast.eos_token == fast.bos_token == fast.pad_token == END_OF_TEXT

    card = (settings.target / "README.md").read_text(encoding="utf-8")
    for part in ("PSF License", "bits per byte", "| stdlib_topics |", "12,288 tokens", "over independence"):
        assert part in card
    assert not list(tmp_path.rglob("*.tmp"))

    backbone.make_backbone(settings, phases=(Phase(2, 64),))
    assert backbone.backbone_complete(settings)
    language_model = AutoModelForCausalLM.from_pretrained(backbone.backbone_folder(settings))
    assert language_model.config.vocab_size == model.config.vocab_size
    assert language_model.dtype == torch.float32

    argv = ["target", "--out", str(settings.out), "--work", str(settings.work)]
    assert command.main(argv) == 0
    assert "target: complete, skipped" in capsys.readouterr().out


def test_user_errors_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["tokenizer", "--out", str(tmp_path)]) == 2
    assert "groups.json does not exist; run stage `manifest` first" in capsys.readouterr().err
    assert command.main(["target", "--out", str(tmp_path)]) == 2
    assert "tokenizer.json does not exist; run stage `tokenizer` first" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["targets"])
    assert "unknown stage 'targets'; stages: manifest, tokenizer, target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"threads": 0}, "--threads must be at least 1, got 0"), ({"seed": -1}, "--seed must be at least 0, got -1")],
)
def test_settings_errors(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(Path("out"), Path("work"), **({"threads": 1, "seed": 0} | changes))


def test_stages_that_are_not_shipped_run_only_when_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def stage(name: str, *, shipped: bool) -> Stage:
        return Stage(lambda _: ran.append(name), lambda _: False, "", shipped=shipped)

    stages = {"first": stage("first", shipped=True), "second": stage("second", shipped=False)}
    monkeypatch.setattr(command, "STAGES", stages)
    for arguments, expected in (
        ([], ["first"]),
        (["second"], ["second"]),
        (["second", "first"], ["first", "second"]),
    ):
        ran.clear()
        assert command.main([*arguments, "--out", str(tmp_path), "--work", str(tmp_path)]) == 0
        assert ran == expected
