"""Settings of batches that the server keeps and answers itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The part of `RouterConfig` that `router/batches/` keeps to."""

    batch_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for files and batches of OpenAI's `/v1/files` and `/v1/batches`, which are served if it is "
            "given (docs/batch-jobs.md). It is for the server's user alone, and a server that starts with it goes on "
            "with its batches.",
            "default": "none: no files, no batches",
            "when": "Clients send many requests whose answers can wait.",
        },
    )
    batch_concurrency: int = field(
        default=32,
        metadata={
            "help": "Requests of all batches under way at once. They take no place of max_concurrent_requests, begin "
            "only while no other request waits, and make room for others.",
            "unit": "requests",
            "min": 1,
            "max": 1024,
            "when": "Raise it until the batch is as large as the model computes efficiently.",
        },
    )
    batch_max_file_bytes: int = field(
        default=200 * 1024 * 1024,
        metadata={
            "help": "Largest file that a client may upload.",
            "unit": "bytes",
            "min": 1,
            "max": 2**40,
            "when": "Raise it for larger batches. It is written to the disk as it comes, never held in memory.",
        },
    )
    batch_max_files: int = field(
        default=1000,
        metadata={
            "help": "Files, and batches, that one API key may keep; without keys, that all may keep. A batch under way "
            "counts as the two files that it may make.",
            "unit": "files",
            "min": 3,
            "max": 100_000,
            "when": "Clients keep many results. Each takes about 1 KB of memory.",
        },
    )
    batch_max_bytes: int = field(
        default=10 * 1024**3,
        metadata={
            "help": "All files together, with what batches under way write and may have to write yet. Beyond it "
            "uploads are refused, and batches wait until somebody deletes files.",
            "unit": "bytes",
            "min": 1,
            "max": 2**50,
            "when": "The disk of batch_dir is smaller, or much larger.",
        },
    )
