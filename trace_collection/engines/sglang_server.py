"""A running SGLang server: ``python -m sglang.launch_server --model-path TARGET --enable-return-routed-experts``.

Written from SGLang's documentation and source (0.5.23); it has not been run against a real server.
"""

from __future__ import annotations

from typing import Any

from ecospec.trace_collection.engines.json_client import JsonClient
from ecospec.trace_collection.engines.replies import Reply, name_of, tokens_to_ask
from ecospec.trace_collection.engines.rows import int32_rows
from ecospec.trace_collection.engines.server import ServerEngine, check_prompt_size, field_of
from ecospec.trace_collection.engines.target_files import TargetFiles
from ecospec.trace_collection.planned import PlannedSequence

_FLAG_MISSING = "start it with --enable-return-routed-experts"
# Seeds are below 2**63; SGLang's sampler hashes 32 bits of them.
_SEED_BITS = 31


class SglangServer(ServerEngine):
    """Asks an SGLang server's native route ``/generate``, token ids in and token ids out.

    Args:
        client: Reaches the server.
        target: The target's files.
        temperature: Sampling temperature, 0 for greedy.

    Raises:
        ConnectionError: The server cannot be reached.
        ValueError: It speculates, returns no experts, ignores seeds, or runs another model than ``target``.
    """

    def __init__(self, client: JsonClient, target: TargetFiles, *, temperature: float) -> None:
        super().__init__(client, target, temperature=temperature)
        self.description["engine"] = "sglang"
        info = self._optional("/server_info", "/get_server_info")
        if isinstance(info, dict):
            self._check_info(info)
        else:
            self.description["speculation"] = "not checked: the server has no /server_info"
        self._check_tokenizer(None)

    def _check_info(self, info: dict[str, Any]) -> None:
        url = self._client.url
        self.description["version"] = info.get("version")
        algorithm = info.get("speculative_algorithm")
        if algorithm:
            raise ValueError(
                f"the server at {url} decodes speculatively ({algorithm}); with eagle-topk > 1 or NGRAM its expert "
                "rows are wrong, so start it without --speculative-algorithm"
            )
        self.description["speculation"] = "off"
        if info.get("enable_return_routed_experts") is False:
            raise ValueError(f"the server at {url} returns no experts; {_FLAG_MISSING}")
        if self._temperature > 0 and info.get("enable_deterministic_inference") is False:
            raise ValueError(
                f"the server at {url} ignores sampling seeds; start it with --enable-deterministic-inference, or "
                "collect greedily (--temperature 0)"
            )
        self.context = next(
            (int(n) for n in (info.get("context_length"), info.get("max_req_input_len")) if n), None
        )
        if info.get("model_path"):
            self._check_model(str(info["model_path"]))

    def _ask(self, sequence: PlannedSequence) -> Reply:
        where = name_of(sequence)
        answer = self._client.post("/generate", self._body(sequence))
        meta = field_of(answer, "meta_info", dict, where)
        check_prompt_size(sequence, meta.get("prompt_tokens"))
        finish = meta.get("finish_reason")
        finish = finish if isinstance(finish, dict) else {"type": finish}
        matched = finish.get("matched")
        return Reply(
            tokens=field_of(answer, "output_ids", list, where),
            rows=int32_rows(
                field_of(meta, "routed_experts", str, where, _FLAG_MISSING), self._target.layout, where
            ),
            finish=str(finish.get("type")),
            stopped_at=matched if isinstance(matched, int) else None,
        )

    def _body(self, sequence: PlannedSequence) -> dict[str, Any]:
        reading = sequence.max_new == 0
        return {
            "input_ids": sequence.ids.tolist(),
            "sampling_params": {
                "max_new_tokens": tokens_to_ask(sequence),
                "temperature": 0.0 if reading else self._temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": reading,
                "stop_token_ids": sorted(self._target.eos_ids),
                "sampling_seed": sequence.seed % 2**_SEED_BITS,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_routed_experts": True,
        }
