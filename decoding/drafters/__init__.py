"""Drafters: what proposes the candidate tree of a speculation step.

`base.Drafter` is the protocol the decoding loop asks for; `eagle3.Eagle3Head` is the EAGLE-3 draft model and
`eagle3_drafter.Eagle3Drafter` the drafter built on it.
"""

from ecospec.decoding.drafters.base import Drafter, StateDrafter
from ecospec.decoding.drafters.eagle3 import Eagle3Head
from ecospec.decoding.drafters.eagle3_config import Eagle3Config
from ecospec.decoding.drafters.eagle3_drafter import Eagle3Drafter

__all__ = ["Drafter", "Eagle3Config", "Eagle3Drafter", "Eagle3Head", "StateDrafter"]
