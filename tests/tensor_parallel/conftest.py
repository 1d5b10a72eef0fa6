from tests.vulkan.conftest import lavapipe  # noqa: F401  (a fixture)
