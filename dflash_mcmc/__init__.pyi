"""The names of the package for editors and type checkers. tests/test_api.py compares them with the real ones."""

from dflash_mcmc.api import (
    LoadedEngine,
    Sample as Sample,
    compare as compare,
    component as component,
    grade as grade,
    read as read,
    run as run,
    sample as sample,
    sweep as sweep,
    write_report as write_report,
)
from dflash_mcmc.blend.draft import DraftBlend as DraftBlend
from dflash_mcmc.blend.layer import LayerBlend as LayerBlend
from dflash_mcmc.blend.model import ModelBlend as ModelBlend
from dflash_mcmc.blend.none import NoBlend as NoBlend
from dflash_mcmc.blend.prompt import PromptBlend as PromptBlend
from dflash_mcmc.dataset.aime24 import Aime24 as Aime24
from dflash_mcmc.dataset.aime25 import Aime25 as Aime25
from dflash_mcmc.dataset.arith import Arith as Arith
from dflash_mcmc.dataset.clbench import ClBench as ClBench
from dflash_mcmc.dataset.gpqa_diamond import GpqaDiamond as GpqaDiamond
from dflash_mcmc.dataset.gsm8k import Gsm8k as Gsm8k
from dflash_mcmc.dataset.hub import HubDataset as HubDataset
from dflash_mcmc.dataset.humaneval import HumanEval as HumanEval
from dflash_mcmc.dataset.jsonl import JsonLines as JsonLines
from dflash_mcmc.dataset.math500 import Math500 as Math500
from dflash_mcmc.dataset.mbpp import Mbpp as Mbpp
from dflash_mcmc.decoder.plain import Plain as Plain
from dflash_mcmc.decoder.speculative_match import SpeculativeMatch as SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection as SpeculativeRejection
from dflash_mcmc.draft.dflash import DFlashDraft as DFlashDraft
from dflash_mcmc.draft.dflash2 import DFlash2Draft as DFlash2Draft
from dflash_mcmc.draft.dspark import DSparkDraft as DSparkDraft
from dflash_mcmc.draft.eagle3 import Eagle3Draft as Eagle3Draft
from dflash_mcmc.draft.model import ModelDraft as ModelDraft
from dflash_mcmc.draft.ngram import NgramDraft as NgramDraft
from dflash_mcmc.draft.none import NoDraft as NoDraft
from dflash_mcmc.draft.self import SelfDraft as SelfDraft
from dflash_mcmc.engine.api import Api as Api
from dflash_mcmc.engine.slots import Slots as Slots
from dflash_mcmc.engine.vllm import Vllm as Vllm
from dflash_mcmc.errors import ConfigError as ConfigError, UserError as UserError
from dflash_mcmc.grading.choice import ChoiceGrader as ChoiceGrader
from dflash_mcmc.grading.code import CodeGrader as CodeGrader
from dflash_mcmc.grading.judge import JudgeGrader as JudgeGrader
from dflash_mcmc.grading.math import MathGrader as MathGrader
from dflash_mcmc.hardware.local import Local as Local
from dflash_mcmc.model.hf import HFModel as HFModel
from dflash_mcmc.potential.examples import ExamplesPotential as ExamplesPotential
from dflash_mcmc.potential.none import NoPotential as NoPotential
from dflash_mcmc.potential.python import PythonPotential as PythonPotential
from dflash_mcmc.potential.regex import RegexPotential as RegexPotential
from dflash_mcmc.potential.reward import RewardPotential as RewardPotential
from dflash_mcmc.potential.verdict import VerdictPotential as VerdictPotential
from dflash_mcmc.probe.deep_readout import DeepReadout as DeepReadout
from dflash_mcmc.probe.difficulty import Difficulty as Difficulty
from dflash_mcmc.probe.layer_rank import LayerRank as LayerRank
from dflash_mcmc.probe.logit_blend import LogitBlend as LogitBlend
from dflash_mcmc.probe.none import NoProbe as NoProbe
from dflash_mcmc.probe.rejection_sampling import RejectionSampling as RejectionSampling
from dflash_mcmc.probe.sampled_verify import SampledVerify as SampledVerify
from dflash_mcmc.probe.speculative_mcmc import SpeculativeMCMC as SpeculativeMCMC
from dflash_mcmc.sampler.best_of_n import BestOfN as BestOfN
from dflash_mcmc.sampler.draft_mh import DraftMH as DraftMH
from dflash_mcmc.sampler.draft_refine import DraftRefine as DraftRefine
from dflash_mcmc.sampler.greedy import Greedy as Greedy
from dflash_mcmc.sampler.lookahead import Lookahead as Lookahead
from dflash_mcmc.sampler.multiple_try import MultipleTry as MultipleTry
from dflash_mcmc.sampler.power_mh import PowerMH as PowerMH
from dflash_mcmc.sampler.power_smc import PowerSMC as PowerSMC
from dflash_mcmc.sampler.replica_exchange import ReplicaExchange as ReplicaExchange
from dflash_mcmc.sampler.temperature import Temperature as Temperature
from dflash_mcmc.tracker.auto import AutoTracker as AutoTracker
from dflash_mcmc.tracker.none import NoTracker as NoTracker
from dflash_mcmc.tracker.trackio import TrackioTracker as TrackioTracker
from dflash_mcmc.tracker.wandb import WandbTracker as WandbTracker

__version__: str
Engine = LoadedEngine
