"""Define one class per mistake. Every message says what was got, where, and what to do."""


class StropError(Exception):
    """Every error that Strop raises on purpose is one of these."""


class UnsupportedError(StropError, NotImplementedError):
    """A program uses something that no stage can compile, and it cannot be run in torch either."""


class CaptureError(StropError, RuntimeError):
    """Tracing a module failed, which keeps running in eager; or no CUDA graph can hold a step."""


class EagerOnlyError(CaptureError):
    """A forward asks for something that no tracer, Strop's or torch's, can tell it."""


class ShapeError(StropError, ValueError):
    """Sizes do not fit the compiled graph, or two sizes cannot be proven compatible."""


class OutOfRangeError(StropError, IndexError, RuntimeError):
    """An index lies outside of the tensor that it looks into. Torch raises an IndexError for some
    operators and a RuntimeError for others (gather): code that catches either goes on working."""


class CodegenError(StropError, RuntimeError):
    """Triton or the C++ compiler refused generated code, or is missing."""


class CacheError(StropError, RuntimeError):
    """A cache entry or an artefact is damaged, or was made for something else."""


class OptionError(StropError, ValueError):
    """An option or argument has a value that Strop does not know."""


class PatternError(StropError, ValueError):
    """A pattern cannot be declared, or its replacement does not give what it replaces."""


class TrainingError(StropError, RuntimeError):
    """A training cannot start or go on; the message says what is kept, and how to continue."""


class AdapterError(StropError, ValueError, RuntimeError):
    """A file with an adapter is damaged, or does not fit the pipeline, which stays as it was.
    diffusers and peft raise a ValueError or a RuntimeError for these: code that catches either goes
    on working."""
