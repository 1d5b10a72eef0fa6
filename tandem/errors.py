"""All errors that Tandem raises on purpose. Each message is one sentence that says what to do.

TandemError
├── ModelFileError        a model file is damaged or not what it says; names file, field and offset
├── ModelNotFoundError    no such file, short name or repository
├── UnsupportedModelError a sound file of a kind this engine does not run; lists the kinds it does
├── ConversionError       a Hugging Face folder is incomplete, or its tensors are not those of its class
├── DownloadError         a pull failed: network, disk, permission, checksum
├── StateFileError        a saved conversation is damaged, or of another model
├── TemplateError         a chat template is broken, leaves its sandbox, or does not end
├── RequestError          a request cannot be served as asked
│   ├── ContextError      the prompt is longer than the context
│   ├── QueueFullError    too many requests are waiting already
│   └── DeadlineError     the request timed out
├── ResponseStoreError    the file of stored responses is locked, full or damaged
├── ToolProgramError      the program of an MCP server has ended, or cannot be started
├── OutOfMemoryError      a request needs more memory than the process may have; others go on
├── DeviceError           a device is missing or failed
│   ├── DoesNotFitError   the model, its context or its cache is larger than the memory
│   ├── DeviceLostError   a device stopped answering; open it again
│   └── CompilerError     a compiler that the NPU needs is missing or failed
└── ProgramError          a Program breaks a rule (shape, overlap, lifetime, missing barrier); a bug in Tandem
    ├── LimitError        a plan for the NPU exceeds a hardware limit
    └── EmulationError    a plan for the NPU hangs, overruns or races in emulation
"""


class TandemError(Exception):
    """Base class of all errors below."""


class ModelFileError(TandemError):
    """A model file is damaged. `field` and `offset` say where."""

    def __init__(self, path: object, field: str, offset: int, problem: str) -> None:
        super().__init__(f"{path}: {field} at byte {offset}: {problem}")
        self.path, self.field, self.offset, self.problem = str(path), field, offset, problem


class ModelNotFoundError(TandemError):
    """No such model."""


class UnsupportedModelError(TandemError):
    """A sound file of a kind this engine does not run."""


class ConversionError(TandemError):
    """A Hugging Face folder is incomplete, or its tensors are not those of its class. No GGUF file was written."""


class DownloadError(TandemError):
    """A pull failed. No incomplete file has the final name."""


class StateFileError(TandemError):
    """A saved conversation is damaged, or of another model."""


class TemplateError(TandemError):
    """A chat template is broken, leaves its sandbox, or does not end."""


class RequestError(TandemError):
    """A request cannot be served as asked."""


class ContextError(RequestError):
    """The prompt is longer than the context. `prompt_tokens`: how many it has, at least; `context`: the limit."""

    def __init__(self, message: str, prompt_tokens: int | None = None, context: int | None = None) -> None:
        super().__init__(message)
        self.prompt_tokens, self.context = prompt_tokens, context


class ResponseNotFoundError(RequestError):
    """No stored response or conversation has this id."""


class SessionNotFoundError(RequestError):
    """No MCP server has this name, or no session this id."""


class ResponseStoreError(TandemError):
    """The file of stored responses is locked, full or damaged."""


class ToolProgramError(TandemError):
    """The program of an MCP server has ended, or cannot be started."""


class QueueFullError(RequestError):
    """Too many requests are waiting already."""


class DeadlineError(RequestError):
    """The request timed out."""


class OutOfMemoryError(TandemError):
    """A request needs more memory than the process may have. Others go on."""

    def __init__(self) -> None:
        super().__init__(
            "there is not enough memory for this request: try again later, or give the process more"
        )


class DeviceError(TandemError):
    """A device is missing, or failed."""


class DoesNotFitError(DeviceError):
    """The model, its context or its cache is larger than the memory. `missing`: bytes, if known; infinite if freeing
    memory would not help."""

    def __init__(self, message: str, missing: float = 0.0) -> None:
        super().__init__(message)
        self.missing = missing


class DeviceLostError(DeviceError):
    """A device stopped answering. Close what ran on it; it can be opened again."""


class CompilerError(DeviceError):
    """A compiler that the NPU needs is missing, or failed."""


class ProgramError(TandemError):
    """A Program breaks a rule of its device; always a bug in Tandem."""


class LimitError(ProgramError):
    """A plan for the NPU exceeds a hardware limit. `limit`: its name."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class EmulationError(ProgramError):
    """A plan for the NPU fails in emulation. `tile`: where."""

    def __init__(self, tile: object, problem: str) -> None:
        super().__init__(f"{tile}: {problem}")
        self.tile = str(tile)
