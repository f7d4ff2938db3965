from tests.runtime.conftest import manifest as manifest
from tests.runtime.conftest import model_info as model_info
