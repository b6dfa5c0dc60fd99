"""A running vLLM server (>= 0.30): ``vllm serve TARGET --enable-return-routed-experts``."""

from __future__ import annotations

from ecospec.trace_collection.engines.json_client import AnswerError, JsonClient
from ecospec.trace_collection.engines.replies import Reply, name_of, tokens_to_ask
from ecospec.trace_collection.engines.rows import npy_rows
from ecospec.trace_collection.engines.server import ServerEngine, check_prompt_size, field_of
from ecospec.trace_collection.engines.target_files import TargetFiles
from ecospec.trace_collection.planned import PlannedSequence

_FLAG_MISSING = "start it with --enable-return-routed-experts"

# Set in every request, because a server takes what is missing from the model's generation_config.json.
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class VllmServer(ServerEngine):
    """Asks a vLLM server's completions route, token ids in and token ids out.

    Args:
        client: Reaches the server.
        target: The target's files.
        temperature: Sampling temperature, 0 for greedy.
        model: Name the server offers the target under; None: the first that is no adapter.

    Raises:
        ConnectionError: The server cannot be reached.
        ValueError: It speculates, does not offer the model, or runs another one than ``target``.
    """

    def __init__(
        self, client: JsonClient, target: TargetFiles, *, temperature: float, model: str | None = None
    ) -> None:
        super().__init__(client, target, temperature=temperature)
        self.description["engine"] = "vllm"
        version = self._optional("/version")
        if isinstance(version, dict):
            self.description["version"] = version.get("version")
        self._model = self._choose_model(model)
        self._refuse_speculation()
        self._check_tokenizer(self._model)

    def _choose_model(self, wanted: str | None) -> str:
        where = f"{self._client.url}/v1/models"
        cards = field_of(self._client.get("/v1/models"), "data", list, where)
        by_name = {card["id"]: card for card in cards if isinstance(card, dict) and "id" in card}
        if wanted is None:
            wanted = next((name for name, card in by_name.items() if card.get("parent") is None), None)
        if wanted is None or wanted not in by_name:
            raise ValueError(
                f"{where} offers {', '.join(by_name) or 'no model'}, not {wanted}; name one with --target"
            )
        card = by_name[wanted]
        self.context = card.get("max_model_len")
        self._check_model(str(card.get("root") or wanted))
        return wanted

    def _refuse_speculation(self) -> None:
        try:
            metrics = self._client.get_text("/metrics")
        except AnswerError:  # metrics can be switched off; nothing else tells
            self.description["speculation"] = "not checked: the server has no /metrics"
            return
        if "vllm:spec_decode_num_drafts" in metrics:
            raise ValueError(
                f"the server at {self._client.url} decodes speculatively; start it without --speculative-config"
            )
        self.description["speculation"] = "off"

    def _ask(self, sequence: PlannedSequence) -> Reply:
        where = name_of(sequence)
        answer = self._client.post("/v1/completions", self._body(sequence))
        (choice,) = field_of(answer, "choices", list, where)[:1] or [None]
        usage = answer.get("usage")
        check_prompt_size(sequence, usage.get("prompt_tokens") if isinstance(usage, dict) else None)
        stopped_at = choice.get("stop_reason") if isinstance(choice, dict) else None
        return Reply(
            tokens=field_of(choice, "token_ids", list, where, "use vLLM >= 0.30"),
            rows=npy_rows(field_of(choice, "routed_experts", str, where, _FLAG_MISSING), where),
            finish=str(choice.get("finish_reason")),
            stopped_at=stopped_at if isinstance(stopped_at, int) else None,
        )

    def _body(self, sequence: PlannedSequence) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": sequence.ids.tolist(),
            "max_tokens": tokens_to_ask(sequence),
            "temperature": self._temperature if sequence.max_new else 0.0,
            **PLAIN_SAMPLING,
            "seed": sequence.seed,
            "ignore_eos": True,  # the ends are the target's own, named next
            "stop_token_ids": sorted(self._target.eos_ids),
            "watermarking": False,
            "return_token_ids": True,
        }
