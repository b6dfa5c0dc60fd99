"""Stage ``tokenizer``: a byte-level BPE of 2,048 tokens, trained on the target's training text only."""

from __future__ import annotations

import shutil

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from checkpoints.recipe.corpus import load_manifest
from checkpoints.recipe.settings import END_OF_TEXT, Settings
from ecospec.trace_collection.stdlib_corpus import documents_of

VOCAB_SIZE = 2048
CONTEXT = 2048


def tokenizer_complete(settings: Settings) -> bool:
    """Return whether the tokenizer files exist."""
    return all((settings.target / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def make_tokenizer(settings: Settings) -> None:
    """Train the tokenizer and save it beside the target, loadable with ``AutoTokenizer.from_pretrained``."""
    texts = [document.text for document in documents_of(load_manifest(settings), "target_train")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    temporary = settings.target.with_name("target.tokenizer.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    fast.save_pretrained(temporary)
    settings.target.mkdir(parents=True, exist_ok=True)
    for path in sorted(temporary.iterdir()):
        path.replace(settings.target / path.name)
    temporary.rmdir()
    sample = texts[0]
    ratio = len(sample.encode()) / len(fast(sample).input_ids)
    print(f"{len(fast)} tokens, {ratio:.2f} bytes per token on a sample")
