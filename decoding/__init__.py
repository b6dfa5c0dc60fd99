"""Cost-aware speculative decoding: draft trees, selection policies, verification, and the loop around them.

A run in five lines::

    target = TargetModel(model)                               # a stock transformers MoE model, eval mode
    loop = DecodingLoop(target, drafter, predictor, make_policy("ecospec"), budget=4)
    result = loop.generate(prompt_ids, max_new_tokens=64, eos=[tokenizer.eos_token_id])
    result.tokens, result.tokens_per_step, result.mean_unique_experts
"""

from __future__ import annotations

from ecospec.decoding.choosing import Greedy, TokenChooser
from ecospec.decoding.loop import DecodingLoop
from ecospec.decoding.lossless import Comparison, LosslessCheck, Margins, classify_mismatch, measure_margins
from ecospec.decoding.oracle import true_experts
from ecospec.decoding.policies import POLICIES, SelectionContext, SelectionPolicy, make_policy
from ecospec.decoding.records import GenerationResult, StepRecord
from ecospec.decoding.target import TargetModel, TargetOutput, TargetSession
from ecospec.decoding.tree import DraftTree, ancestor_mask, select_nodes
from ecospec.decoding.tree_recording import RecordedTree, record_text, record_tree
from ecospec.decoding.verify import accepted_path, tree_attention_mask

__all__ = [
    "POLICIES",
    "Comparison",
    "DecodingLoop",
    "DraftTree",
    "GenerationResult",
    "Greedy",
    "LosslessCheck",
    "Margins",
    "RecordedTree",
    "SelectionContext",
    "SelectionPolicy",
    "StepRecord",
    "TargetModel",
    "TargetOutput",
    "TargetSession",
    "TokenChooser",
    "accepted_path",
    "ancestor_mask",
    "classify_mismatch",
    "make_policy",
    "measure_margins",
    "record_text",
    "record_tree",
    "select_nodes",
    "tree_attention_mask",
    "true_experts",
]
