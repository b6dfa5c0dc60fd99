"""The bundle: config contract, round trip, atomic writes, refusals, hub calls, import weight."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec.predictor import (
    ExpertPredictor,
    FrequencyPredictor,
    Predictor,
    PredictorConfig,
    RandomPredictor,
    load_predictor,
)
from ecospec.predictor.bundle_files import BUNDLE_FILES
from tests.predictor_fakes import BACKBONE, EMBEDDING_SIZE, OTHER_SPEC, SPEC, embedding_table, tiny_predictor

IDS = torch.arange(7)


def neural_config(**changes):
    fields = {"backbone": BACKBONE, "input_mode": "target_embedding", "embedding_size": EMBEDDING_SIZE, **changes}
    return PredictorConfig(**{"kind": "neural", "spec": SPEC, **fields})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "predictor"
    tiny_predictor(
        temperature=(0.5, 1.0, 2.0),
        training_data={"store": "abc", "tokens": 1000},
        metrics={"top_k_overlap": {"mean": 0.875}},
        provenance={"seed": 0},
    ).save_pretrained(folder)
    return folder


def test_round_trip(bundle):
    assert sorted(path.name for path in bundle.iterdir()) == sorted(BUNDLE_FILES)
    loaded = ExpertPredictor.from_pretrained(bundle, target_embedding=embedding_table(), require_spec=SPEC)
    expected = tiny_predictor(temperature=(0.5, 1.0, 2.0))
    torch.testing.assert_close(loaded.score_sequence(IDS), expected.score_sequence(IDS), rtol=0, atol=1e-6)
    assert loaded.config == PredictorConfig.read(bundle)
    assert loaded.config.training_data == {"store": "abc", "tokens": 1000}
    assert loaded.spec == SPEC
    assert isinstance(loaded, Predictor)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_scores_are_logits_divided_by_their_layers_temperature(bundle):
    loaded = ExpertPredictor.from_pretrained(bundle, target_embedding=embedding_table())
    logits = loaded.model(IDS.unsqueeze(0))[0]
    assert loaded.score_sequence(IDS).dtype == torch.float32
    torch.testing.assert_close(loaded.score_sequence(IDS)[:, 0], logits[:, 0] / 0.5)
    torch.testing.assert_close(loaded.score_sequence(IDS)[:, 2], logits[:, 2] / 2.0)


def test_embedding_is_stored_only_when_asked(bundle, tmp_path):
    assert not [name for name in load_file(bundle / "model.safetensors") if "embed" in name]
    without = ExpertPredictor.from_pretrained(bundle)
    with pytest.raises(ValueError, match="pass target_embedding="):
        without.score_sequence(IDS)
    with pytest.raises(ValueError, match="needs the target's token embedding"):
        without.save_pretrained(tmp_path / "never", store_embedding=True)
    assert not (tmp_path / "never").exists()
    predictor = tiny_predictor()
    predictor.save_pretrained(tmp_path / "whole", store_embedding=True)
    whole = ExpertPredictor.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    torch.testing.assert_close(whole.score_sequence(IDS).float(), predictor.score_sequence(IDS), rtol=0, atol=1e-4)
    assert "get_input_embeddings" not in (tmp_path / "whole" / "README.md").read_text()
    assert "get_input_embeddings" in (bundle / "README.md").read_text()


def test_dtype_on_save_and_on_load(bundle, tmp_path):
    tiny_predictor().save_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    assert load_file(tmp_path / "bf16" / "model.safetensors")["head.weight"].dtype == torch.bfloat16
    stored = ExpertPredictor.from_pretrained(tmp_path / "bf16", target_embedding=embedding_table())
    assert stored.model.head.weight.dtype == torch.bfloat16
    widened = load_predictor(tmp_path / "bf16", target_embedding=embedding_table(), dtype=torch.float32)
    assert isinstance(widened, ExpertPredictor)
    assert widened.model.head.weight.dtype == torch.float32
    torch.testing.assert_close(widened.score_sequence(IDS), stored.score_sequence(IDS), rtol=0.1, atol=0.2)


def test_card_says_what_it_is(bundle):
    card = (bundle / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: ecospec\n")
    for line in ("| top_k_overlap.mean | 0.875 |", "| num_experts | 8 |", "| seed | 0 |", "| store | abc |"):
        assert line in card


def test_predictor_of_another_target_is_one_line(bundle):
    for load in (ExpertPredictor.from_pretrained, load_predictor):
        with pytest.raises(ValueError, match="was made for another target than target other: target_fing") as error:
            load(bundle, require_spec=OTHER_SPEC)
        assert "\n" not in str(error.value)


def test_full_folder_is_kept_unless_told(bundle, tmp_path):
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    with pytest.raises(FileExistsError, match="is not empty; give another folder or allow overwriting"):
        RandomPredictor.create(SPEC).save_pretrained(bundle)
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    RandomPredictor.create(SPEC).save_pretrained(bundle, overwrite=True)
    assert PredictorConfig.read(bundle).kind == "random"
    (tmp_path / "empty").mkdir()
    RandomPredictor.create(SPEC).save_pretrained(tmp_path / "empty")
    (bundle / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds thesis\.tex, which is no part of a bundle"):
        RandomPredictor.create(SPEC).save_pretrained(bundle, overwrite=True)
    with pytest.raises(FileExistsError, match="is a file; give another folder"):
        RandomPredictor.create(SPEC).save_pretrained(bundle / "config.json")


def test_interrupted_write_leaves_the_old_bundle_and_no_litter(bundle, monkeypatch):
    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    before = (bundle / "config.json").read_bytes()
    monkeypatch.setattr("ecospec.predictor.bundle_files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        RandomPredictor.create(SPEC).save_pretrained(bundle, overwrite=True)
    with pytest.raises(OSError, match="No space left"):
        RandomPredictor.create(SPEC).save_pretrained(bundle.parent / "new" / "predictor")
    assert (bundle / "config.json").read_bytes() == before
    assert not list(bundle.parent.glob(".*"))
    assert not list((bundle.parent / "new").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 9}, "format_version is 9"),
        ({"kind": "oracle"}, "kind is 'oracle'; allowed:"),
        ({"spec": None}, "spec must be a RoutingSpec"),
        ({"backbone": None}, "backbone must be a JSON object"),
        ({"backbone": {"hidden_size": 4}}, "backbone needs a model_type"),
        (
            {"input_mode": "backbone_embeding"},
            "unknown PredictorConfig.input_mode .*did you mean 'backbone_embedding'",
        ),
        (
            {"input_mode": "backbone_embedding"},
            "embedding_size must not be set with input_mode 'backbone_embedding'",
        ),
        (
            {"input_mode": "backbone_embedding", "embedding_size": None, "embedding_stored": True},
            "embedding_stored must not be set",
        ),
        ({"head_rank": 0}, "head_rank must be a positive integer"),
        ({"embedding_size": 0}, "embedding_size must be a positive integer"),
        ({"embedding_stored": 1}, "embedding_stored must be"),
        ({"temperature": [1.0] * 3}, "temperature must be a tuple"),
        ({"temperature": (1.0, 1.0)}, "temperature has 2 entries; the target has 3 MoE layers"),
        ({"temperature": (1.0, 0.0, 1.0)}, "positive finite numbers, got 0.0"),
        ({"temperature": (1.0, float("nan"), 1.0)}, "positive finite numbers, got nan"),
        ({"metrics": {"loss": float("nan")}}, "metrics cannot be written as JSON"),
        ({"options": {"file": object()}}, "options cannot be written as JSON"),
        ({"provenance": {"argv": ("a",)}}, "provenance changes when written as JSON"),
        ({"training_data": [1]}, "training_data must be a JSON object"),
        ({"kind": "random"}, "backbone must be null for kind 'random'"),
    ],
)
def test_every_config_field_is_validated(changes, message):
    with pytest.raises(ValueError, match=message):
        neural_config(**changes)


def test_tables_have_no_embedding():
    with pytest.raises(ValueError, match="embedding_stored must be false for kind 'random'"):
        PredictorConfig(kind="random", spec=SPEC, embedding_stored=True)
    with pytest.raises(ValueError, match="has no target embedding to store"):
        RandomPredictor.create(SPEC).bundle_tensors(store_embedding=True)


def test_config_round_trip_and_defaults():
    config = neural_config(metrics={"a": 1})
    assert config.temperature == (1.0, 1.0, 1.0)
    assert PredictorConfig.from_dict(json.loads(config.to_json())) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "random"


def test_version_1_is_read_as_a_full_head_and_nothing_else(bundle):
    data = json.loads((bundle / "config.json").read_text())
    del data["head_rank"]
    (bundle / "config.json").write_text(json.dumps(data | {"format_version": 1}))
    loaded = load_predictor(bundle, target_embedding=embedding_table())
    assert loaded.config.head_rank is None
    assert loaded.config.format_version == 2
    edit_config(bundle, head_rank=4)  # version 1 had no such field
    with pytest.raises(ValueError, match="format_version is 1, this version reads 2"):
        load_predictor(bundle)
    (bundle / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="field 'head_rank' is missing"):
        load_predictor(bundle)


def test_read_errors_name_field_and_file(bundle, tmp_path):
    text = (bundle / "config.json").read_text()
    edit_config(bundle, colour="red")
    with pytest.raises(ValueError, match=r"config\.json: unknown predictor config field 'colour'"):
        load_predictor(bundle)
    data = json.loads(text)
    del data["calibration"]
    (bundle / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"config\.json: predictor config field 'calibration' is missing"):
        load_predictor(bundle)
    (bundle / "config.json").write_text(text)
    for calibration, message in (
        ({"scale": []}, "'calibration' must be"),
        ({"temperature": 1.0}, "must list|must be"),
    ):
        edit_config(bundle, calibration=calibration)
        with pytest.raises(ValueError, match=message):
            load_predictor(bundle)
    (bundle / "config.json").write_text(text)
    edit_config(bundle, spec=SPEC.to_dict() | {"top_k": 99})
    with pytest.raises(ValueError, match=r"config\.json: spec: RoutingSpec.top_k 99 exceeds"):
        load_predictor(bundle)
    for broken, message in (("{", r"config\.json: not valid JSON"), ("[]", "must be a JSON object, got list")):
        (bundle / "config.json").write_text(broken)
        with pytest.raises(ValueError, match=message):
            load_predictor(bundle)
    with pytest.raises(FileNotFoundError, match=r"is no predictor bundle: (it has )?no config\.json"):
        load_predictor(tmp_path)


def test_weights_are_checked(bundle):
    path = bundle / "model.safetensors"
    tensors = load_file(path)
    cases = [
        (lambda t: t.pop("head.bias"), "tensor 'head.bias' is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown tensor 'extra'"),
        (lambda t: t.update({"head.bias": torch.zeros(3)}), r"tensor 'head.bias' is \(3,\)"),
        (lambda t: t.update({"target_embedding.weight": torch.zeros(40, 12)}), "embedding_stored of config.json"),
    ]
    for change, message in cases:
        changed = dict(tensors)
        change(changed)
        save_file(changed, path)
        with pytest.raises(ValueError, match=message):
            ExpertPredictor.from_pretrained(bundle)
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        ExpertPredictor.from_pretrained(bundle)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        ExpertPredictor.from_pretrained(bundle)


def test_wrong_kind_and_wrong_path(bundle, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds a predictor of kind 'neural', not 'frequency'; open it with load"):
        FrequencyPredictor.from_pretrained(bundle)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give an exported bundle folder"):
        load_predictor(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError, match="predictor runs/gone does not exist"):  # and no network is asked
        load_predictor("runs/gone")
    with pytest.raises(ValueError, match="config and network disagree"):
        ExpertPredictor(neural_config(backbone={**BACKBONE, "hidden_size": 16}), tiny_predictor().model)


def test_hub_ids_are_downloaded_and_failures_are_one_line(bundle, monkeypatch):
    asked = []

    def download(repo_id, **options):
        asked.append((repo_id, options))
        if repo_id == "me/gone":
            raise OSError("404 Client Error\nRepository Not Found")
        return str(bundle)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = ExpertPredictor.from_pretrained("me/predictor", revision="v1", target_embedding=embedding_table())
    assert loaded.spec == SPEC
    assert asked == [("me/predictor", {"allow_patterns": list(BUNDLE_FILES), "revision": "v1"})]
    with pytest.raises(FileNotFoundError, match=r"cannot be read from the hub \(404 Client Error\)") as error:
        ExpertPredictor.from_pretrained("me/gone")
    assert "\n" not in str(error.value)


def test_push_to_hub_uploads_a_whole_bundle(monkeypatch):
    uploaded = {}

    class Api:
        def __init__(self, **_options):
            pass

        def create_repo(self, repo_id, **_options):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id, folder_path, **_options):
            uploaded[repo_id] = sorted(path.name for path in folder_path.iterdir())
            return "url"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    assert tiny_predictor().push_to_hub("me/predictor") == "url"
    assert uploaded == {"me/predictor": sorted(BUNDLE_FILES)}


def test_public_names_load_no_training_library():
    code = (
        "import sys, ecospec.predictor as p\n"
        "assert 'torch' not in sys.modules\n"
        "[getattr(p, name) for name in p.__all__]\n"
        "assert set(p.__all__) == set(p._MODULE_OF)\n"
        "heavy = {'lightning', 'datasets', 'peft', 'pyarrow', 'sklearn', 'pandas', 'matplotlib'}\n"
        "assert not heavy & {name.split('.')[0] for name in sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError):
        from ecospec.predictor import no_such_name  # noqa: F401
