"""Parquet files of sentence pairs and of their scores, read a batch of rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ziggurat.system.compressed import uncompressed_file
from ziggurat.system.errors import DataError, printable


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with uncompressed_file(path) as file, pq.ParquetFile(file) as table:
            yield table
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {printable(str(error), 200)}") from error


def parquet_pairs(path: Path, names: tuple[str, str], rows: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield two string columns, `rows` rows at a time; `a.b` is field b of struct column a. Raises DataError."""
    row = 0
    try:
        with _opened(path) as table:
            schema = table.schema_arrow
            # Arrow reads whole top-level columns; _texts then takes the field.
            tops = [name if name in schema.names else name.split(".")[0] for name in names]
            for name, top in zip(names, tops, strict=True):
                if top not in schema.names:
                    structs = {
                        column.name: [field.name for field in column.type]
                        for column in schema
                        if pa.types.is_struct(column.type)
                    }
                    its = {column: f" ({', '.join(fields)})" for column, fields in structs.items()}
                    known = ", ".join(f"{column}{its.get(column, '')}" for column in schema.names)
                    hint = nested_hint(names, structs)
                    raise DataError(f"{path}: no column {name!r}; it has: {printable(known, 200)}{hint}")
            for batch in table.iter_batches(batch_size=rows, columns=sorted(set(tops))):
                source, target = (_texts(batch, name, path) for name in names)
                yield source, target
                row += batch.num_rows
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: a text in row {row + 1} or later is not valid UTF-8 ({error.reason})") from None


def nested_hint(names: Sequence[str], fields: Mapping[str, Sequence[str]]) -> str:
    """Return a hint if both texts are fields of one column, as in the data sets of Hugging Face.

    `fields` are those of each column that has any; they may have the names of the requested columns or be languages.
    """
    for column, its in fields.items():
        if set(names) <= set(its):
            return f": set `columns: [{', '.join(f'{column}.{name}' for name in names)}]`"
    if pairs := {column: its for column, its in fields.items() if len(its) == 2}:
        column, its = next(iter(pairs.items()))
        return f": is it `columns: [{', '.join(f'{column}.{name}' for name in its)}]`, or the other way round?"
    return ""


def _texts(batch: pa.RecordBatch, name: str, path: Path) -> list[str]:
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


def parquet_numbers(path: Path, name: str) -> Iterator[NDArray[np.float64]]:
    """Yield a column of numbers, a batch of rows at a time. Raises DataError, including for rows without a number."""
    row = 0
    with _opened(path) as table:
        if name not in table.schema_arrow.names:
            known = ", ".join(table.schema_arrow.names)
            raise DataError(f"{path}: no column {name!r}; it has: {printable(known, 200)}")
        for batch in table.iter_batches(columns=[name]):
            column = batch.column(0)
            if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
                raise DataError(f"{path}: column {name!r} has no numbers but {column.type}")
            found = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
            if np.isnan(found).any():  # null as well
                place = row + int(np.isnan(found).argmax()) + 1
                raise DataError(f"{path}: no number in column {name!r} of row {place}")
            row += len(found)
            yield found
