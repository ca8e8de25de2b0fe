"""The names of ``tf.data.experimental.service``; `daskdist.data.service` has the plain ones."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import DATA_SERVICE

_NAMES: Final = {
    "CrossTrainerCache": "daskdist.service.sharding_policy:CrossTrainerCache",
    "DispatchServer": "daskdist.tensorflow.servers:DispatchServer",
    "DispatcherConfig": "daskdist.tensorflow.servers:DispatcherConfig",
    "ShardingPolicy": "daskdist.service.sharding_policy:ShardingPolicy",
    "WorkerConfig": "daskdist.tensorflow.servers:WorkerConfig",
    "WorkerServer": "daskdist.tensorflow.servers:WorkerServer",
    "distribute": "daskdist.tensorflow.service:distribute",
    "from_dataset_id": "daskdist.tensorflow.service:from_dataset_id",
    "register_dataset": "daskdist.data.service:register_dataset",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, DATA_SERVICE)
