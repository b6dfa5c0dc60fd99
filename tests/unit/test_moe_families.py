"""Every MoE family of the installed transformers: built tiny, run, and held against witnesses that share no code.

The families come from transformers' own files, so one that a new release adds is tested, or fails here, by itself.
"""

import functools
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ecospec.predictor.family_notes import NOTES, text_config
from ecospec.predictor.fingerprint import (
    fingerprint_of_state,
    router_tensors,
    routing_config,
    target_fingerprint,
)
from ecospec.trace_collection.families import TOKENS, examine, render
from ecospec.trace_collection.tiny_targets import EXPERT_COUNTS, EXPERTS, TOP_K, moe_families, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
FAMILIES = moe_families()
DENSE = {"llama4", "llama4_text"}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


@functools.cache
def found(family):
    try:
        return examine(family)
    except Exception as error:
        raise AssertionError(
            f"{family}: not supported, not refused, not tested; if it can be, give it an entry in "
            f"predictor/family_notes.py ({type(error).__name__}: {error})"
        ) from error


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_ids_are_what_the_experts_execute(family):
    finding = found(family)
    if finding.status != "supported":
        assert finding.reason
        return
    assert finding.agrees, f"the recorder saw other sets than the {finding.witness}"
    assert (finding.rows, finding.num_experts, finding.top_k) == (TOKENS, EXPERTS, TOP_K)
    assert finding.executed, "an expert that was recorded was not executed"
    assert finding.sparse == (family not in DENSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_from_files_equals_that_of_the_model(family, tmp_path):
    finding = found(family)
    if finding.status != "supported":
        return
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    assert target_fingerprint(tmp_path) == fingerprint_of_state(model.config, state)
    routers = router_tensors(model.config, state)
    assert tuple(router.layer for router in routers if router.role == "weight") == finding.layers
    routing = routing_config(model.config)
    assert (routing["E"], routing["K"]) == (EXPERTS, TOP_K)
    biases = {name.rpartition(".")[2] for name in state if "correction_bias" in name or "expert_bias" in name}
    assert {router.role for router in routers} >= ({"weight", "correction_bias"} if biases else {"weight"})


def test_most_families_are_supported_and_none_is_left_unbuilt():
    by_status: dict[str, list[str]] = {}
    for family in FAMILIES:
        by_status.setdefault(found(family).status, []).append(family)
    assert len(by_status["supported"]) > 65
    assert "not built" not in by_status
    unfit = {"deepseek_v4", "doge", "inkling2_loop", "jetmoe", "longcat_flash", "zaya"}
    assert set(by_status["refused"]) >= unfit | {"nllb-moe", "switch_transformers"}


@pytest.mark.parametrize("family", [note.model_types[0] for note in NOTES if note.no_moe])
def test_families_called_dense_count_no_experts(family):
    text = text_config(CONFIG_MAPPING[family]())
    assert not any(getattr(text, name, None) for name in EXPERT_COUNTS)


def test_entries_name_families_that_exist():
    known = set(FAMILIES) | {"diffusion_gemma_text", "glm4_moe"}
    assert not {name for note in NOTES for name in note.model_types} - known


def test_page_is_what_the_code_finds():
    page = render([found(family) for family in FAMILIES], transformers.__version__)
    assert PAGE.read_text(encoding="utf-8") == page, (
        "run python -m ecospec.trace_collection.families > docs/families.md"
    )


def test_page_lists_what_could_not_be_built():
    from ecospec.trace_collection.families import Finding

    page = render([Finding("some_moe", "not built", "needs the package nowhere")], "0")
    assert "Not built here, untested" in page
    assert "| `some_moe` | needs the package nowhere |" in page
