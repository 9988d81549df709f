//! Conversion of the partial file of a Parquet output to the Parquet file.
//!
//! Columns: `row` (int64, index in the input), `id` (string, if ids are read), and `embedding` (list of float32, named as
//! the Parquet specification says, so that all readers see a list). A row group is written at once, so its size bounds the
//! memory; the index at the end of the file grows by some hundred bytes for each.

use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{ColumnPath, Type};

use super::record::read_record;

/// Bytes of the vectors of a row group. Readers load row groups as a whole; 64 MiB is a common size.
const GROUP_BYTES: usize = 64 << 20;

/// Maximum rows of a row group, for short vectors.
const GROUP_ROWS_MAX: usize = 100_000;

/// Levels of a value in a list that is neither null nor empty: the list and its elements are required, the repeated group
/// between them counts.
const VALUE_LEVEL: i16 = 1;

/// Columns of a row group.
#[derive(Default)]
struct GroupColumns {
    rows: Vec<i64>,
    ids: Vec<ByteArray>,
    values: Vec<f32>,
}

/// Converts the records of `input` to Parquet.
pub(crate) fn convert(
    input: impl Read,
    output: impl Write + Send,
    dimension: usize,
    has_ids: bool,
) -> Result<(), ParquetError> {
    let mut input = BufReader::with_capacity(1 << 20, input);
    let mut writer = SerializedFileWriter::new(output, Arc::new(schema(has_ids)?), Arc::new(properties()))?;
    let group_rows = (GROUP_BYTES / (dimension.max(1) * 4)).clamp(1, GROUP_ROWS_MAX);
    loop {
        let mut columns = GroupColumns::default();
        while columns.rows.len() < group_rows
            && let Some(record) = read_record(&mut input, dimension)?
        {
            columns
                .rows
                .push(i64::try_from(record.row).map_err(|error| ParquetError::General(error.to_string()))?);
            columns.ids.extend(record.id.map(ByteArray::from));
            columns.values.extend_from_slice(&record.vector);
        }
        if columns.rows.is_empty() {
            return writer.close().map(drop);
        }
        write_group(writer.next_row_group()?, &columns, dimension, has_ids)?;
    }
}

/// Returns the error of the operating system that caused an error of the conversion, such as a full disk.
pub(crate) fn into_io(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(inner) => match inner.downcast::<io::Error>() {
            Ok(error) => *error,
            Err(other) => io::Error::other(other),
        },
        other => io::Error::other(other),
    }
}

fn write_group<W: Write + Send>(
    mut group: SerializedRowGroupWriter<'_, W>,
    columns: &GroupColumns,
    dimension: usize,
    has_ids: bool,
) -> Result<(), ParquetError> {
    let GroupColumns { rows, ids, values } = columns;
    write_column::<Int64Type, W>(&mut group, rows, None)?;
    if has_ids {
        write_column::<ByteArrayType, W>(&mut group, ids, None)?;
    }
    let defined = vec![VALUE_LEVEL; values.len()];
    // 0 begins a list, 1 continues it.
    let repeated: Vec<i16> = (0..values.len()).map(|at| i16::from(!at.is_multiple_of(dimension))).collect();
    write_column::<FloatType, W>(&mut group, values, Some((&defined, &repeated)))?;
    group.close().map(drop)
}

fn write_column<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: &[T::T],
    levels: Option<(&[i16], &[i16])>,
) -> Result<(), ParquetError> {
    let missing = || ParquetError::General("the schema has fewer columns than are written".to_owned());
    let mut column = group.next_column()?.ok_or_else(missing)?;
    let (defined, repeated) = levels.unzip();
    column.typed::<T>().write_batch(values, defined, repeated)?;
    column.close()
}

fn schema(has_ids: bool) -> Result<Type, ParquetError> {
    let required = |name: &str, physical: PhysicalType, logical: Option<LogicalType>| {
        let builder = Type::primitive_type_builder(name, physical);
        builder.with_repetition(Repetition::REQUIRED).with_logical_type(logical).build().map(Arc::new)
    };
    let mut columns = vec![required("row", PhysicalType::INT64, None)?];
    if has_ids {
        columns.push(required("id", PhysicalType::BYTE_ARRAY, Some(LogicalType::String))?);
    }
    let element = required("element", PhysicalType::FLOAT, None)?;
    let list =
        Type::group_type_builder("list").with_repetition(Repetition::REPEATED).with_fields(vec![element]);
    let embedding = Type::group_type_builder("embedding")
        .with_repetition(Repetition::REQUIRED)
        .with_logical_type(Some(LogicalType::List))
        .with_fields(vec![Arc::new(list.build()?)]);
    columns.push(Arc::new(embedding.build()?));
    Type::group_type_builder("schema").with_fields(columns).build()
}

fn properties() -> WriterProperties {
    // The values of vectors do not repeat, so neither a dictionary nor compression saves space, and their limits help no
    // query.
    let vectors = ColumnPath::from(vec!["embedding".to_owned(), "list".to_owned(), "element".to_owned()]);
    WriterProperties::builder()
        .set_created_by("meridian".to_owned())
        .set_dictionary_enabled(false)
        .set_column_statistics_enabled(vectors, EnabledStatistics::None)
        .build()
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;

    use super::super::record::write_record;
    use super::*;
    use crate::row::RowId;

    #[test]
    fn records_become_rows_in_several_groups() {
        // Two row groups.
        let (dimension, rows) = (512, GROUP_BYTES / (512 * 4) + 3);
        let mut records = Vec::new();
        for row in 0..rows {
            let id = RowId::Text(format!("id {row}"));
            write_record(row as u64 * 2, Some(&id), &vec![row as f32; dimension], &mut records);
        }
        let mut file = Vec::new();
        convert(&records[..], &mut file, dimension, true).expect("memory");
        let reader = SerializedFileReader::new(bytes_of(file)).expect("a file");
        assert_eq!(reader.num_row_groups(), 2);
        for (at, row) in reader.get_row_iter(None).expect("rows").enumerate() {
            let row = row.expect("a row");
            assert_eq!(row.get_long(0).expect("a row index"), at as i64 * 2);
            assert_eq!(row.get_string(1).expect("an id"), &format!("id {at}"));
            let list = row.get_list(2).expect("a vector");
            assert_eq!(list.len(), dimension);
        }
        assert_eq!(reader.metadata().file_metadata().num_rows(), rows as i64);
    }

    #[test]
    fn no_rows_are_a_valid_file() {
        let mut file = Vec::new();
        convert(&[][..], &mut file, 0, false).expect("memory");
        let reader = SerializedFileReader::new(bytes_of(file)).expect("a file");
        assert_eq!(reader.metadata().file_metadata().num_rows(), 0);
    }

    /// Writes the bytes to a file, because the reader of the crate reads files.
    fn bytes_of(content: Vec<u8>) -> std::fs::File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&content).expect("a file");
        file
    }
}
