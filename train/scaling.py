"""What a training run takes: parameters, memory, operations and time, from shapes alone.

Every number is one of the formulas below; `docs/training.md` shows them with the tables that `tables` writes, and a
test compares that page with this file.

Shapes: H width of the target's embedding, V its vocabulary, L MoE layers, E experts, K top-k; d width of the
backbone, f of its feed-forward network, q and k widths of all query and all key heads, n layers, T context.
"""

from __future__ import annotations

from dataclasses import dataclass

from ecospec.predictor.backbones import BACKBONE_PRESETS

#: Dense bf16 peak of an H200 in operations a second, and its memory in bytes (NVIDIA's data sheet).
H200_FLOPS = 989e12
H200_BYTES = 141e9

#: Share of the peak that a training step reaches: an assumption, not a measurement.
UTILISATION = 0.35


@dataclass(frozen=True)
class TargetShape:
    """A target as training sees it.

    Attributes:
        name: For tables.
        embedding_size: H.
        vocab_size: V.
        num_layers: L.
        num_experts: E.
        top_k: K.
    """

    name: str
    embedding_size: int
    vocab_size: int
    num_layers: int
    num_experts: int
    top_k: int

    @property
    def trace_bytes_per_token(self) -> int:
        """Bytes of a token in the run's plain files: its id and K experts of one byte in L layers."""
        return 4 + self.num_layers * self.top_k


#: The paper's targets.
TARGETS = (
    TargetShape("Qwen3-235B-A22B", 4096, 151_936, 94, 128, 8),
    TargetShape("GPT-OSS-120B", 2880, 201_088, 36, 128, 4),
    TargetShape("DeepSeek-V3.1", 7168, 129_280, 58, 256, 8),
)

#: The paper's backbones.
BACKBONES = ("qwen3-0.6b", "deepseek-r1-distill-qwen-1.5b")


@dataclass(frozen=True)
class Run:
    """A run to be worked out.

    Attributes:
        tokens: Training tokens of one epoch.
        epochs: Passes over them.
        batch_tokens: Tokens of a batch of all devices together.
        context: Longest window, T.
        devices: Number of H200.
    """

    tokens: int = 8_000_000
    epochs: int = 100
    batch_tokens: int = 65_536
    context: int = 4096
    devices: int = 8


@dataclass(frozen=True)
class Estimate:
    """What a run takes.

    Attributes:
        backbone: Parameters of the backbone, without embedding and LM head.
        projection: H d.
        head: d L E + L E.
        state_bytes: Weights, gradients and AdamW's two averages, float32.
        embedding_bytes: The target's embedding, float32; a copy on every device.
        activation_bytes: Kept for the backward pass on one device.
        checkpointed_bytes: The same with gradient checkpointing.
        score_bytes: Scores, their float32 copy and the gradients of both, on one device.
        flops_per_token: Of a training step: forward and backward.
        seconds: Of the whole run.
    """

    backbone: int
    projection: int
    head: int
    state_bytes: int
    embedding_bytes: int
    activation_bytes: int
    checkpointed_bytes: int
    score_bytes: int
    flops_per_token: float
    seconds: float

    @property
    def parameters(self) -> int:
        """N: everything that training changes."""
        return self.backbone + self.projection + self.head

    def device_bytes(self, *, checkpointing: bool = False, sharded_over: int = 1) -> int:
        """Memory of one device.

        Args:
            checkpointing: With gradient checkpointing.
            sharded_over: Devices that weights, gradients and averages are divided over (FSDP2); 1 for DDP.
        """
        kept = self.checkpointed_bytes if checkpointing else self.activation_bytes
        return self.state_bytes // sharded_over + self.embedding_bytes + kept + self.score_bytes


def estimate(target: TargetShape, backbone: str, run: Run) -> Estimate:
    """Work a run out.

    Args:
        target: The target.
        backbone: Name of a preset (`ecospec.predictor.backbones.BACKBONE_PRESETS`).
        run: Its size.
    """
    config = BACKBONE_PRESETS[backbone]
    d, f, n = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim", d // config["num_attention_heads"])
    q, k = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    # Qwen3 normalises queries and keys, Qwen2 has biases there.
    extra = 2 * head_dim if config["model_type"] == "qwen3" else q + 2 * k
    own = n * (2 * d * q + 2 * d * k + 3 * d * f + 2 * d + extra) + d
    outputs = target.num_layers * target.num_experts
    projection, head = target.embedding_size * d, (d + 1) * outputs
    parameters = own + projection + head
    tokens = run.batch_tokens // run.devices
    # A layer keeps, for each token and in bf16 where not said otherwise: of its two norms input, float32 value and
    # output (16 d) and two sums (4 d); queries, keys and values before and after norm and rotation, in part float32
    # (12 each); the attention's output (2 q); gate, up, activation and product (8 f).
    layer = tokens * (20 * d + 12 * (q + 2 * k) + 2 * q + 8 * f)
    flops = 6 * parameters + 6 * n * q * run.context
    return Estimate(
        backbone=own,
        projection=projection,
        head=head,
        state_bytes=16 * parameters,
        embedding_bytes=4 * target.vocab_size * target.embedding_size,
        activation_bytes=n * layer,
        checkpointed_bytes=2 * n * tokens * d + layer,
        score_bytes=12 * tokens * outputs,
        flops_per_token=flops,
        seconds=run.tokens * run.epochs * flops / (run.devices * H200_FLOPS * UTILISATION),
    )


def tables(run: Run | None = None) -> str:
    """The two tables of ``docs/training.md``, in Markdown.

    Args:
        run: Its size; None for the one of the page.
    """
    run = run or Run()
    memory = [
        (
            "| backbone | target | N = backbone + H·d + (d+1)·L·E, M | 16 N, GB | 4 V·H, GB | activations, GB | "
            "with checkpointing, GB | scores, GB | DDP, GB | DDP + checkpointing, GB | FSDP2 + checkpointing, GB |"
        ),
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    time = [
        "| backbone | target | trace files, GB | 6 N + 6 n·q·T, GFLOP per token | all tokens, EFLOP | hours |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for backbone in BACKBONES:
        for target in TARGETS:
            e = estimate(target, backbone, run)
            sums = " + ".join(f"{value / 1e6:.1f}" for value in (e.backbone, e.projection, e.head))
            sizes = [e.state_bytes, e.embedding_bytes, e.activation_bytes, e.checkpointed_bytes, e.score_bytes]
            sizes += [e.device_bytes(), e.device_bytes(checkpointing=True)]
            sizes += [e.device_bytes(checkpointing=True, sharded_over=run.devices)]
            cells = " | ".join(f"{size / 1e9:.1f}" for size in sizes)
            memory.append(f"| {backbone} | {target.name} | {e.parameters / 1e6:.1f} = {sums} | {cells} |")
            traces = run.tokens * target.trace_bytes_per_token / 1e9
            total = run.tokens * run.epochs * e.flops_per_token / 1e18
            time.append(
                f"| {backbone} | {target.name} | {traces:.1f} | {e.flops_per_token / 1e9:.2f} | {total:.2f} | "
                f"{e.seconds / 3600:.2f} |"
            )
    return "\n".join([*memory, "", *time])
