//! Reader of a string column of a Parquet file.
//!
//! Columns are read in chunks of [`CHUNK_ROWS`] values, so memory is that of a page and a chunk and does not grow with the
//! file.

use std::fs::File;

use parquet::basic::{ConvertedType, LogicalType, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;

use super::source::{FieldNames, InputError, ROW_BYTES_MAX, TextReader};
use crate::row::{ParsedRow, RowId, RowProblem, TextRow};

/// Values that are read from a column at once.
const CHUNK_ROWS: usize = 256;

/// Reader of Parquet.
pub(super) struct ParquetReader {
    name: String,
    file: SerializedFileReader<File>,
    text: usize,
    id: Option<usize>,
    next_group: usize,
    /// Columns of the current row group.
    group: Option<GroupReader>,
    /// Rows of the current chunk in reverse order.
    chunk: Vec<ParsedRow>,
    rows_read: u64,
    rows_total: u64,
}

/// Readers of the columns of a row group.
struct GroupReader {
    text: ColumnReader,
    id: Option<ColumnReader>,
    rows_left: usize,
}

impl ParquetReader {
    /// Opens a file and finds the columns.
    pub(super) fn open(name: String, file: File, fields: &FieldNames) -> Result<ParquetReader, InputError> {
        let invalid = |reason: String| InputError::Invalid { name: name.clone(), reason };
        let file = SerializedFileReader::new(file)
            .map_err(|error| invalid(format!("cannot be read as Parquet: {error}")))?;
        let schema = file.metadata().file_metadata().schema_descr_ptr();
        let columns = schema.columns();
        let find = |wanted: &str| {
            let found = columns.iter().position(|column| column.path().parts() == [wanted]);
            found.ok_or_else(|| {
                let names: Vec<String> = columns.iter().map(|column| column.path().string()).collect();
                invalid(format!("there is no column {wanted:?}; the columns are {}", names.join(", ")))
            })
        };
        let text = find(&fields.text)?;
        if !is_text(&columns[text]) {
            return Err(invalid(format!(
                "the column {:?} is of type {}; expected strings",
                fields.text,
                type_name(&columns[text])
            )));
        }
        let id = fields.id.as_ref().map(|id| find(id)).transpose()?;
        if let Some(id) = id.map(|id| &columns[id])
            && !(is_text(id) || is_integer(id))
        {
            return Err(invalid(format!(
                "the column {:?} is of type {}; expected strings or integers",
                id.name(),
                type_name(id)
            )));
        }
        let rows_total = u64::try_from(file.metadata().file_metadata().num_rows()).unwrap_or(0);
        Ok(ParquetReader {
            name,
            file,
            text,
            id,
            next_group: 0,
            group: None,
            chunk: Vec::new(),
            rows_read: 0,
            rows_total,
        })
    }

    /// Reads the next chunk; returns whether there is one.
    fn fill(&mut self) -> Result<bool, ParquetError> {
        loop {
            if let Some(group) = &mut self.group
                && group.rows_left > 0
            {
                let rows = group.rows_left.min(CHUNK_ROWS);
                group.rows_left -= rows;
                let texts = read_text(&mut group.text, rows)?;
                let ids = group.id.as_mut().map(|id| read_ids(id, rows)).transpose()?;
                let mut ids = ids.map(Vec::into_iter);
                let rows = texts.into_iter().map(|text| {
                    let id = ids.as_mut().map(|ids| ids.next().unwrap_or(Err(RowProblem::new(NULL_ID))));
                    let row = text.and_then(|text| Ok(TextRow { text, id: id.transpose()? }));
                    ParsedRow::new(None, row)
                });
                self.chunk = rows.collect();
                self.chunk.reverse();
                return Ok(true);
            }
            if self.next_group == self.file.num_row_groups() {
                return Ok(false);
            }
            let group = self.file.get_row_group(self.next_group)?;
            self.next_group += 1;
            let rows_left = usize::try_from(group.metadata().num_rows()).unwrap_or(0);
            let text = group.get_column_reader(self.text)?;
            let id = self.id.map(|id| group.get_column_reader(id)).transpose()?;
            self.group = Some(GroupReader { text, id, rows_left });
        }
    }
}

impl TextReader for ParquetReader {
    fn next_row(&mut self) -> Result<Option<ParsedRow>, InputError> {
        if self.chunk.is_empty() && !self.fill().map_err(|error| self.failed(&error))? {
            return Ok(None);
        }
        self.rows_read += 1;
        Ok(self.chunk.pop())
    }

    fn fraction(&self) -> Option<f64> {
        (self.rows_total > 0).then(|| self.rows_read as f64 / self.rows_total as f64)
    }
}

impl ParquetReader {
    fn failed(&self, error: &ParquetError) -> InputError {
        let reason = format!("cannot be read as Parquet after {} rows: {error}", self.rows_read);
        InputError::Invalid { name: self.name.clone(), reason }
    }
}

const NULL_ID: &str = "the id is null; expected a string or an integer";

fn is_text(column: &ColumnDescriptor) -> bool {
    // Old writers do not annotate strings; the values are checked to be UTF-8.
    let annotation = (column.logical_type_ref(), column.converted_type());
    let is_string = matches!(annotation, (Some(LogicalType::String), _) | (None, ConvertedType::UTF8))
        || annotation == (None, ConvertedType::NONE);
    column.physical_type() == PhysicalType::BYTE_ARRAY && column.max_rep_level() == 0 && is_string
}

fn is_integer(column: &ColumnDescriptor) -> bool {
    let is_plain = matches!(column.logical_type_ref(), None | Some(LogicalType::Integer(_)));
    let is_signed = !matches!(
        column.converted_type(),
        ConvertedType::UINT_8 | ConvertedType::UINT_16 | ConvertedType::UINT_32 | ConvertedType::UINT_64
    );
    matches!(column.physical_type(), PhysicalType::INT32 | PhysicalType::INT64)
        && column.max_rep_level() == 0
        && is_plain
        && is_signed
}

fn type_name(column: &ColumnDescriptor) -> String {
    let logical = column.logical_type_ref().map(|logical| format!(" ({logical:?})")).unwrap_or_default();
    format!("{}{logical}", column.physical_type())
}

/// Reads the next rows of a column; a null is `None`.
fn read_values<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    rows: usize,
) -> Result<Vec<Option<T::T>>, ParquetError> {
    let (mut levels, mut values) = (Vec::new(), Vec::new());
    let mut read = 0;
    while read < rows {
        let (records, _, _) = reader.read_records(rows - read, Some(&mut levels), None, &mut values)?;
        if records == 0 {
            return Err(ParquetError::General("a column ends before its row group".to_owned()));
        }
        read += records;
    }
    if levels.is_empty() {
        // A required column has no levels.
        return Ok(values.into_iter().map(Some).collect());
    }
    // The column is not nested, so the level of a value is 1.
    let mut values = values.into_iter();
    Ok(levels.into_iter().map(|level| if level == 1 { values.next() } else { None }).collect())
}

fn read_text(
    reader: &mut ColumnReader,
    rows: usize,
) -> Result<Vec<Result<String, RowProblem>>, ParquetError> {
    let ColumnReader::ByteArrayColumnReader(reader) = reader else {
        return Err(ParquetError::General("the type of the column differs from the schema".to_owned()));
    };
    let values = read_values::<ByteArrayType>(reader, rows)?;
    Ok(values.into_iter().map(|value| text_of(value.as_ref())).collect())
}

fn text_of(value: Option<&ByteArray>) -> Result<String, RowProblem> {
    let Some(value) = value else {
        return Err(RowProblem::new("the value is null; expected a string"));
    };
    if value.len() > ROW_BYTES_MAX {
        let limit = ROW_BYTES_MAX >> 20;
        return Err(RowProblem::new(format!(
            "the text is longer than {limit} MiB, the limit of a row; split it"
        )));
    }
    let text = std::str::from_utf8(value.data()).map_err(|_| RowProblem::new("the value is not UTF-8"))?;
    Ok(text.to_owned())
}

fn read_ids(reader: &mut ColumnReader, rows: usize) -> Result<Vec<Result<RowId, RowProblem>>, ParquetError> {
    let id = |value: Option<i64>| value.map(|id| RowId::Integer(id.into())).ok_or(RowProblem::new(NULL_ID));
    Ok(match reader {
        ColumnReader::Int64ColumnReader(reader) => {
            read_values::<Int64Type>(reader, rows)?.into_iter().map(id).collect()
        }
        ColumnReader::Int32ColumnReader(reader) => {
            let values = read_values::<Int32Type>(reader, rows)?;
            values.into_iter().map(|value| id(value.map(i64::from))).collect()
        }
        other => {
            let texts = read_text(other, rows)?.into_iter();
            texts.map(|text| text.map(RowId::Text).map_err(|_| RowProblem::new(NULL_ID))).collect()
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::basic::{Compression, Repetition};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::types::Type;

    use super::*;

    fn column(name: &str, physical: PhysicalType, repetition: Repetition, is_string: bool) -> Arc<Type> {
        let logical = is_string.then_some(LogicalType::String);
        let builder = Type::primitive_type_builder(name, physical);
        Arc::new(builder.with_repetition(repetition).with_logical_type(logical).build().expect("a column"))
    }

    /// Writes row groups of texts, `None` for null, with consecutive ids.
    fn write(groups: &[Vec<Option<&str>>], compression: Compression) -> File {
        let columns = vec![
            column("id", PhysicalType::INT64, Repetition::REQUIRED, false),
            column("text", PhysicalType::BYTE_ARRAY, Repetition::OPTIONAL, true),
            column("size", PhysicalType::DOUBLE, Repetition::REQUIRED, false),
        ];
        let schema = Type::group_type_builder("schema").with_fields(columns).build().expect("a schema");
        let file = tempfile::tempfile().expect("a file");
        let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
        let clone = file.try_clone().expect("a handle");
        let mut writer = SerializedFileWriter::new(clone, Arc::new(schema), properties).expect("a writer");
        let mut next_id = 0;
        for group in groups {
            let mut row_group = writer.next_row_group().expect("a row group");
            let ids: Vec<i64> = (next_id..).take(group.len()).collect();
            next_id += group.len() as i64;
            let mut column = row_group.next_column().expect("columns").expect("a column");
            column.typed::<Int64Type>().write_batch(&ids, None, None).expect("ids");
            column.close().expect("a column");
            let values: Vec<ByteArray> =
                group.iter().flatten().map(|text| ByteArray::from(text.as_bytes().to_vec())).collect();
            let levels: Vec<i16> = group.iter().map(|text| i16::from(text.is_some())).collect();
            let mut column = row_group.next_column().expect("columns").expect("a column");
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).expect("texts");
            column.close().expect("a column");
            let sizes = vec![0.5; group.len()];
            let mut column = row_group.next_column().expect("columns").expect("a column");
            column.typed::<parquet::data_type::DoubleType>().write_batch(&sizes, None, None).expect("sizes");
            column.close().expect("a column");
            row_group.close().expect("a row group");
        }
        writer.close().expect("a file");
        file
    }

    fn open(file: File, text: &str, id: Option<&str>) -> Result<ParquetReader, InputError> {
        let fields = FieldNames { text: text.to_owned(), id: id.map(str::to_owned) };
        ParquetReader::open("f.parquet".to_owned(), file, &fields)
    }

    fn all(reader: &mut ParquetReader) -> Vec<ParsedRow> {
        std::iter::from_fn(|| reader.next_row().expect("a file")).collect()
    }

    #[test]
    fn rows_are_read_across_chunks_and_row_groups() {
        let many: Vec<String> = (0..1000).map(|row| format!("text {}", row % 7)).collect();
        let many: Vec<Option<&str>> = many.iter().map(|text| Some(text.as_str())).collect();
        let groups = [many.clone(), vec![], vec![Some("last")]];
        let zstd = Compression::ZSTD(Default::default());
        for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, zstd] {
            let mut reader = open(write(&groups, compression), "text", Some("id")).expect("a file");
            let rows = all(&mut reader);
            assert_eq!((rows.len(), reader.fraction()), (1001, Some(1.0)));
            for (at, (row, text)) in rows.iter().zip(many.iter().chain([&Some("last")])).enumerate() {
                let id = Some(RowId::Integer((at as i64).into()));
                let expected = TextRow { text: text.expect("a text").to_owned(), id };
                assert_eq!(row.content.as_ref(), Ok(&expected));
            }
        }
    }

    #[test]
    fn a_null_and_an_empty_text_are_problems() {
        let file = write(&[vec![Some("a"), None, Some(""), Some("b")]], Compression::UNCOMPRESSED);
        let rows = all(&mut open(file, "text", None).expect("a file"));
        let valid: Vec<bool> = rows.iter().map(|row| row.content.is_ok()).collect();
        assert_eq!(valid, [true, false, false, true]);
    }

    #[test]
    fn a_missing_column_another_type_and_another_format_are_errors() {
        let file = || write(&[vec![Some("a")]], Compression::UNCOMPRESSED);
        let message = |text, id| open(file(), text, id).err().expect("an error").to_string();
        assert!(message("body", None).contains("no column \"body\"; the columns are id, text, size"));
        assert!(message("size", None).contains("\"size\" is of type DOUBLE; expected strings"));
        assert!(message("text", Some("size")).contains("expected strings or integers"));
        let empty = open(tempfile::tempfile().expect("a file"), "text", None).err().expect("an error");
        assert!(empty.to_string().contains("cannot be read as Parquet"), "{empty}");
    }
}
