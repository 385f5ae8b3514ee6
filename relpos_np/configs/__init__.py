"""From the configuration of a published model to what the attention of its layers is."""

from relpos_np.configs.bound import BoundAttention
from relpos_np.configs.layer import LayerAttention
from relpos_np.configs.plans import Rule, SchemePlan, Temperature
from relpos_np.configs.read import from_config, layers_of, model_types, parts_of

__all__ = [
    "BoundAttention",
    "LayerAttention",
    "Rule",
    "SchemePlan",
    "Temperature",
    "from_config",
    "layers_of",
    "model_types",
    "parts_of",
]
