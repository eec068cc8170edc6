"""Configuration of an experiment: typed sections, strict YAML, overrides. Imports no torch.

Order of reading: base, then the sections (data; model with wiring; train with lifecycle and growth; decode), the whole
in experiment; yaml_text and load read it, edit writes it changed; reference, recipes and papers describe it;
compatibility, notices, languages and methods judge it.
"""

from ziggurat.config.base import Section
from ziggurat.config.data import CorpusConfig, DataConfig, RegularisationConfig, SubwordConfig
from ziggurat.config.decode import DecodingConfig, LengthPenaltyConfig, MaxLengthConfig
from ziggurat.config.experiment import CONFIG_FORMAT, Experiment
from ziggurat.config.filters import FilterConfig
from ziggurat.config.load import dump, load_experiment, parse_experiment
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import TrainingConfig

__all__ = [
    "CONFIG_FORMAT",
    "CorpusConfig",
    "DataConfig",
    "DecodingConfig",
    "Experiment",
    "FilterConfig",
    "LengthPenaltyConfig",
    "MaxLengthConfig",
    "ModelConfig",
    "RegularisationConfig",
    "Section",
    "SubwordConfig",
    "TrainingConfig",
    "dump",
    "load_experiment",
    "parse_experiment",
]
