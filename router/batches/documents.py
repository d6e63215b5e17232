"""OpenAI's shapes of files and batches: what is read of a request, what answers say, and what is kept on the disk."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from router.schemas import Lenient, NotServed

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
MOST_METADATA = 16
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class CreateBatch(Lenient):
    """The body of `POST /v1/batches`."""

    input_file_id: str = Field(description="A file of purpose `batch`.")
    endpoint: Endpoint = Field(description="The `url` of every line.")
    completion_window: Literal["24h"] = Field(description="What is not answered by then has expired.")
    metadata: Annotated[dict[Key, Value], Field(max_length=MOST_METADATA)] | None = None

    not_served: ClassVar[Any] = {"output_expires_after": NotServed(sentence="is not served: files stay until deleted")}


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None


FileId = Annotated[str, Field(pattern=r"^file-[0-9a-f]{24}$")]
BatchId = Annotated[str, Field(pattern=r"^batch_[0-9a-f]{24}$")]
Number = Annotated[int, Field(alias="_number", ge=1)]


class FileRecord(FileObject):
    """A file as it is on the disk."""

    id: FileId
    bytes: Annotated[int, Field(ge=0)]
    owner: str
    number: Number


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(BaseModel):
    """Why a batch failed as a whole."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """All reasons."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Lines of the input; 0 until it was looked at."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchRecord(BatchObject):
    """A batch as it is on the disk."""

    id: BatchId
    input_file_id: FileId
    owner: str
    number: Number
    code: Literal[None, "batch_cancelled", "batch_expired"] = Field(alias="_code")
    output_id: FileId = Field(alias="_output")
    errors_id: FileId = Field(alias="_errors")
    room: int = Field(0, alias="_room", ge=0)


class BatchList(BaseModel):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
