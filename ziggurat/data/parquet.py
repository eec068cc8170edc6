"""Parquet files of sentence pairs, read a batch of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.system.compressed import uncompressed_file
from ziggurat.system.errors import DataError, printable


def parquet_pairs(path: Path, names: tuple[str, str], rows: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield two string columns, so many rows at a time; `a.b` is field b of the struct column a. Raises DataError."""
    row = 0
    try:
        with uncompressed_file(path) as file, pq.ParquetFile(file) as table:
            # Arrow reads whole top-level columns; _texts then takes the field.
            tops = [name if name in table.schema_arrow.names else name.split(".")[0] for name in names]
            for name, top in zip(names, tops, strict=True):
                if top not in table.schema_arrow.names:
                    known = ", ".join(table.schema_arrow.names)
                    raise DataError(f"{path}: no column {name!r}; it has: {printable(known, 200)}")
            for batch in table.iter_batches(batch_size=rows, columns=sorted(set(tops))):
                texts = [_texts(batch, name, path) for name in names]
                yield texts[0], texts[1]
                row += batch.num_rows
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: a text in rows {row + 1} and following is not valid UTF-8 ({error.reason})") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {printable(str(error), 200)}") from error


def _texts(batch: pa.RecordBatch, name: str, path: Path) -> list[str]:
    """Return the texts in column `name` of `batch`; null is an empty text."""
    steps = [name] if name in batch.schema.names else name.split(".")
    column = batch.column(steps[0])
    for step in steps[1:]:
        if not pa.types.is_struct(column.type) or column.type.get_field_index(step) < 0:
            raise DataError(f"{path}: column {name!r}: {steps[0]} has no field {step!r} (its type is {column.type})")
        column = column.field(step)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise DataError(f"{path}: column {name!r} is not text but {column.type}")
    return [text.replace("\n", " ") if text else "" for text in column.to_pylist()]
