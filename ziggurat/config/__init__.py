"""Configuration of an experiment: typed sections, strict YAML, overrides. Imports no torch.

Modules in reading order: section, the base of all; the sections themselves (data; model; train with lifecycle and
depth; decode); experiment, which joins them; pipeline, the file of a pipeline. load reads configurations; reference,
choices and recipes describe them; model_rules and notices check them.
"""

from ziggurat.config.data import CorpusConfig as CorpusConfig
from ziggurat.config.data import DataConfig as DataConfig
from ziggurat.config.data import FilterConfig as FilterConfig
from ziggurat.config.data import RegularisationConfig as RegularisationConfig
from ziggurat.config.data import SubwordConfig as SubwordConfig
from ziggurat.config.decode import DecodingConfig as DecodingConfig
from ziggurat.config.decode import LengthPenaltyConfig as LengthPenaltyConfig
from ziggurat.config.decode import MaxLengthConfig as MaxLengthConfig
from ziggurat.config.experiment import CONFIG_FORMAT as CONFIG_FORMAT
from ziggurat.config.experiment import Experiment as Experiment
from ziggurat.config.load import dump as dump
from ziggurat.config.load import load_experiment as load_experiment
from ziggurat.config.load import parse_experiment as parse_experiment
from ziggurat.config.model import ModelConfig as ModelConfig
from ziggurat.config.section import Section as Section
from ziggurat.config.train import TrainingConfig as TrainingConfig
