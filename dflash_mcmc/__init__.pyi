"""The names of the package for editors and type checkers. tests/test_api.py compares them with the real ones."""

from dflash_mcmc.api import LoadedEngine
from dflash_mcmc.api import Sample as Sample
from dflash_mcmc.api import compare as compare
from dflash_mcmc.api import component as component
from dflash_mcmc.api import read as read
from dflash_mcmc.api import run as run
from dflash_mcmc.api import sample as sample
from dflash_mcmc.blend.draft import DraftBlend as DraftBlend
from dflash_mcmc.blend.layer import LayerBlend as LayerBlend
from dflash_mcmc.blend.none import NoBlend as NoBlend
from dflash_mcmc.dataset.aime24 import Aime24 as Aime24
from dflash_mcmc.dataset.aime25 import Aime25 as Aime25
from dflash_mcmc.dataset.arith import Arith as Arith
from dflash_mcmc.dataset.clbench import ClBench as ClBench
from dflash_mcmc.dataset.gpqa_diamond import GpqaDiamond as GpqaDiamond
from dflash_mcmc.dataset.gsm8k import Gsm8k as Gsm8k
from dflash_mcmc.dataset.hub import HubDataset as HubDataset
from dflash_mcmc.dataset.humaneval import HumanEval as HumanEval
from dflash_mcmc.dataset.jsonl import JsonLines as JsonLines
from dflash_mcmc.dataset.livecodebench import LiveCodeBench as LiveCodeBench
from dflash_mcmc.dataset.math500 import Math500 as Math500
from dflash_mcmc.dataset.mbpp import Mbpp as Mbpp
from dflash_mcmc.decoder.plain import Plain as Plain
from dflash_mcmc.decoder.speculative_match import SpeculativeMatch as SpeculativeMatch
from dflash_mcmc.decoder.speculative_rejection import SpeculativeRejection as SpeculativeRejection
from dflash_mcmc.draft.dflash import DFlashDraft as DFlashDraft
from dflash_mcmc.draft.ngram import NgramDraft as NgramDraft
from dflash_mcmc.draft.none import NoDraft as NoDraft
from dflash_mcmc.draft.self import SelfDraft as SelfDraft
from dflash_mcmc.engine.slots import Slots as Slots
from dflash_mcmc.engine.vllm import Vllm as Vllm
from dflash_mcmc.errors import ConfigError as ConfigError
from dflash_mcmc.errors import UserError as UserError
from dflash_mcmc.grader.choice import ChoiceGrader as ChoiceGrader
from dflash_mcmc.grader.code import CodeGrader as CodeGrader
from dflash_mcmc.grader.judge import JudgeGrader as JudgeGrader
from dflash_mcmc.grader.math import MathGrader as MathGrader
from dflash_mcmc.hardware.local import Local as Local
from dflash_mcmc.model.hf import HFModel as HFModel
from dflash_mcmc.probe.adaptation import Adaptation as Adaptation
from dflash_mcmc.probe.deep_readout import DeepReadout as DeepReadout
from dflash_mcmc.probe.difficulty import Difficulty as Difficulty
from dflash_mcmc.probe.layer_rank import LayerRank as LayerRank
from dflash_mcmc.probe.logit_blend import LogitBlend as LogitBlend
from dflash_mcmc.probe.mixing import Mixing as Mixing
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
from dflash_mcmc.tracker.jsonl import JsonlTracker as JsonlTracker
from dflash_mcmc.tracker.none import NoTracker as NoTracker
from dflash_mcmc.tracker.tensorboard import TensorBoardTracker as TensorBoardTracker
from dflash_mcmc.tracker.wandb import WandbTracker as WandbTracker

__version__: str
Engine = LoadedEngine
