//! Reader of CSV with a header row: quoting as in RFC 4180, line breaks in quotes included.
//!
//! The crate `csv` accepts any input. Two cases would give wrong rows or unlimited memory: a quote that is not closed makes
//! the rest of the file one field. So the bytes of a record are limited, and a marker is appended to the input: if the
//! last record contains the marker, its quote is open.
//!
//! The position of a record, as the crate states it, is before the line breaks that precede it. The line of its first byte
//! follows from the line after the record, the line breaks in its fields, and the byte that ends it.

use std::cell::{Cell, RefCell};
use std::io::{self, Read};
use std::rc::Rc;

use csv::{ByteRecord, ReaderBuilder};

use super::source::{ByteCount, CountedInput, FieldNames, InputError, ROW_BYTES_MAX, TextReader};
use crate::row::{ParsedRow, RowId, RowProblem, TextRow};

/// Marker of the end of the input. Its random part does not occur in texts.
const END_MARKER: &[u8] = b"\nend-of-input-5f0d1c7a93b24e68\n";

/// Bytes that the CSV reader reads ahead.
const BUFFER_BYTES: usize = 64 << 10;

/// Reader of CSV.
pub(super) struct CsvReader<R> {
    name: String,
    reader: csv::Reader<MarkedInput<CountedInput<R>>>,
    shared: Rc<InputState>,
    count: ByteCount,
    record: ByteRecord,
    columns: usize,
    text: usize,
    id: Option<usize>,
}

/// State of the input that the reader of records needs.
#[derive(Default)]
struct InputState {
    /// Bytes until reading fails.
    budget: Cell<usize>,
    block: RefCell<LastBlock>,
}

/// Last block that was read.
#[derive(Default)]
struct LastBlock {
    /// Offset of the block.
    start: u64,
    bytes: Vec<u8>,
    /// Byte before the block.
    before: Option<u8>,
}

impl LastBlock {
    fn follow(&mut self, bytes: &[u8]) {
        self.start += self.bytes.len() as u64;
        self.before = self.bytes.last().copied().or(self.before);
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the byte before an offset in the block or at its ends.
    fn byte_before(&self, offset: u64) -> Option<u8> {
        match offset.checked_sub(self.start)? {
            0 => self.before,
            within => self.bytes.get(usize::try_from(within).ok()? - 1).copied(),
        }
    }
}

/// Input that ends with the marker, and fails if more bytes than the budget are read.
struct MarkedInput<R> {
    inner: R,
    shared: Rc<InputState>,
    /// Bytes of the marker that were returned, once the input has ended.
    marker: Option<usize>,
}

impl<R: Read> Read for MarkedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.marker.is_none() {
            let budget = self.shared.budget.get();
            if budget == 0 {
                return Err(io::Error::other(RecordTooLong));
            }
            let count = self.inner.read(buffer)?;
            self.shared.budget.set(budget.saturating_sub(count));
            self.shared.block.borrow_mut().follow(&buffer[..count]);
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
        }
        let used = self.marker.get_or_insert(0);
        let count = buffer.len().min(END_MARKER.len() - *used);
        buffer[..count].copy_from_slice(&END_MARKER[*used..*used + count]);
        *used += count;
        self.shared.block.borrow_mut().follow(&buffer[..count]);
        Ok(count)
    }
}

/// Error for a record of the input file that is longer than the limit.
#[derive(Debug, thiserror::Error)]
#[error("record too long")]
struct RecordTooLong;

impl<R: Read> CsvReader<R> {
    /// Reads the header of an input of `total` bytes, and finds the columns in it.
    pub(super) fn open(
        name: String,
        input: R,
        total: Option<u64>,
        fields: &FieldNames,
    ) -> Result<CsvReader<R>, InputError> {
        let (input, count) = CountedInput::new(input, total);
        let shared = Rc::new(InputState::default());
        let input = MarkedInput { inner: input, shared: Rc::clone(&shared), marker: None };
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .buffer_capacity(BUFFER_BYTES)
            .from_reader(input);
        let record = ByteRecord::new();
        let mut opened = CsvReader { name, reader, shared, count, record, columns: 0, text: 0, id: None };
        if opened.read_record()?.is_none() {
            return Err(opened
                .invalid(None, "is empty; the first line must be a header with column names".to_owned()));
        }
        let header: Vec<String> =
            opened.record.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        opened.columns = header.len();
        opened.text = opened.column(&header, &fields.text)?;
        opened.id = fields.id.as_ref().map(|id| opened.column(&header, id)).transpose()?;
        Ok(opened)
    }

    fn column(&self, header: &[String], wanted: &str) -> Result<usize, InputError> {
        let mut found = header.iter().enumerate().filter(|(_, name)| *name == wanted);
        match (found.next(), found.next()) {
            (Some((column, _)), None) => Ok(column),
            (Some(_), Some(_)) => Err(self
                .invalid(Some(1), format!("the header has the column {wanted:?} twice; rename one of them"))),
            (None, _) => Err(self.invalid(
                Some(1),
                format!("the header has no column {wanted:?}; its columns are {}", header.join(", ")),
            )),
        }
    }

    fn invalid(&self, line: Option<u64>, reason: String) -> InputError {
        let name = line.map_or(self.name.clone(), |line| format!("{}:{line}", self.name));
        InputError::Invalid { name, reason }
    }

    /// Reads the next record; returns its first line.
    fn read_record(&mut self) -> Result<Option<u64>, InputError> {
        // The reader may hold the beginning of the next record already, so the limit is exact up to one buffer.
        self.shared.budget.set(ROW_BYTES_MAX + BUFFER_BYTES);
        let start = self.reader.position().line();
        match self.reader.read_byte_record(&mut self.record) {
            Ok(false) => Ok(None),
            Ok(true) => {
                let marker = &END_MARKER[1..END_MARKER.len() - 1];
                let last = self.record.iter().next_back().unwrap_or_default();
                if self.record.len() == 1 && last == marker {
                    return Ok(None);
                }
                if last.ends_with(END_MARKER) {
                    let reason = "a quote in this record is not closed; close it, or double it inside of a quoted field";
                    // The record ended with the input, and not with a line break.
                    return Err(self.invalid(Some(self.first_line(false)), reason.to_owned()));
                }
                Ok(Some(self.first_line(true)))
            }
            Err(error) => Err(self.failed(error, start)),
        }
    }

    /// Returns the line of the first byte of the record that was read; `is_ended` unless the input ended within it.
    fn first_line(&self, is_ended: bool) -> u64 {
        let end = self.reader.position();
        let is_break = |byte: &u8| *byte == b'\n';
        let inside = self.record.as_slice().iter().copied().filter(|byte| is_break(byte)).count() as u64;
        let last = self.shared.block.borrow().byte_before(end.byte());
        end.line() - inside - u64::from(is_ended && last.as_ref().is_some_and(is_break))
    }

    fn failed(&self, error: csv::Error, line: u64) -> InputError {
        match error.into_kind() {
            csv::ErrorKind::Io(error) if error.get_ref().is_some_and(|inner| inner.is::<RecordTooLong>()) => {
                let limit = ROW_BYTES_MAX >> 20;
                self.invalid(
                    Some(line),
                    format!(
                        "the record is longer than {limit} MiB, the limit of a row; is a quote not closed?"
                    ),
                )
            }
            csv::ErrorKind::Io(reason) => InputError::Read { name: self.name.clone(), reason },
            other => self.invalid(Some(line), format!("not CSV: {other:?}")),
        }
    }

    fn parse(&self) -> Result<TextRow, RowProblem> {
        let (given, columns) = (self.record.len(), self.columns);
        if given != columns {
            return Err(RowProblem::new(format!(
                "the record has {given} fields, and the header has {columns}; quote fields with commas or line breaks"
            )));
        }
        let field = |column: usize| {
            let bytes = self.record.get(column).unwrap_or_default();
            let text = std::str::from_utf8(bytes).map_err(|_| {
                RowProblem::new(format!("field {} is not UTF-8; convert the file to UTF-8", column + 1))
            })?;
            Ok(text.to_owned())
        };
        Ok(TextRow { text: field(self.text)?, id: self.id.map(field).transpose()?.map(RowId::Text) })
    }
}

impl<R: Read> TextReader for CsvReader<R> {
    fn next_row(&mut self) -> Result<Option<ParsedRow>, InputError> {
        let Some(line) = self.read_record()? else { return Ok(None) };
        Ok(Some(ParsedRow::new(Some(line), self.parse())))
    }

    fn fraction(&self) -> Option<f64> {
        self.count.fraction()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open<'a>(bytes: &'a [u8], id: Option<&str>) -> Result<CsvReader<&'a [u8]>, InputError> {
        let fields = FieldNames { text: "text".to_owned(), id: id.map(str::to_owned) };
        CsvReader::open("f.csv".to_owned(), bytes, None, &fields)
    }

    fn all(reader: &mut dyn TextReader) -> Result<Vec<ParsedRow>, InputError> {
        std::iter::from_fn(|| reader.next_row().transpose()).collect()
    }

    fn texts(bytes: &[u8]) -> Vec<(u64, Option<String>)> {
        let rows = all(&mut open(bytes, None).expect("a header")).expect("rows");
        let line = |row: &ParsedRow| row.line.expect("a line");
        rows.into_iter().map(|row| (line(&row), row.content.ok().map(|row| row.text))).collect()
    }

    fn error(bytes: &[u8], id: Option<&str>) -> String {
        open(bytes, id).and_then(|mut reader| all(&mut reader)).expect_err("an error").to_string()
    }

    #[test]
    fn quotes_commas_and_line_breaks_are_read_as_in_rfc_4180() {
        let row = |line: u64, text: &str| (line, Some(text.to_owned()));
        assert_eq!(
            texts(b"\xef\xbb\xbfid,text\r\n1,\"a, \"\"b\"\"\r\nc\"\r\n2,d\r\n3,\" e \""),
            [row(2, "a, \"b\"\r\nc"), row(4, "d"), row(5, " e ")]
        );
        assert_eq!(texts(b"text\na\n\n\nb\n"), [row(2, "a"), row(5, "b")], "empty lines are no rows");
        assert_eq!(texts(b"text\n"), []);
        assert_eq!(texts(b"text"), []);
    }

    #[test]
    fn a_record_with_other_fields_or_encoding_is_a_problem_and_the_next_one_is_read() {
        let rows = texts(b"id,text\n1\n2,b,c\n3,\xff\n4,\n5,good\n");
        let good = |row: &(u64, Option<String>)| row.1.is_some();
        assert_eq!(rows.iter().map(good).collect::<Vec<_>>(), [false, false, false, false, true]);
        assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
    }

    #[test]
    fn errors_of_the_whole_file_name_the_line_and_the_fix() {
        assert!(error(b"", None).contains("f.csv: is empty"));
        let message = error(b"a,b\n1,2\n", None);
        assert!(
            message.starts_with("f.csv:1: the header has no column \"text\"") && message.ends_with("a, b")
        );
        assert!(error(b"text,text\n1,2\n", None).contains("twice"));
        assert!(error(b"text\n1\n", Some("id")).contains("no column \"id\""));
        for end in ["", "\n", "\n\n"] {
            let message = error(format!("text\na\n\"b\nc\nd{end}").as_bytes(), None);
            assert!(message.starts_with("f.csv:3: a quote"), "{message}");
        }
    }

    #[test]
    fn a_quote_that_is_never_closed_does_not_fill_the_memory() {
        let endless = io::Read::chain(&b"text\nok\n\""[..], io::repeat(b'a'));
        let fields = FieldNames { text: "text".to_owned(), id: None };
        let mut reader = CsvReader::open("f.csv".to_owned(), endless, None, &fields).expect("a header");
        assert!(reader.next_row().expect("a row").is_some());
        let message = reader.next_row().expect_err("no end").to_string();
        assert!(message.starts_with("f.csv:3: the record is longer than 16 MiB"), "{message}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn written_records_are_read_back(rows in prop::collection::vec(("[a-c\",\r\n ]{0,8}", "[x\"\n,]{1,8}"), 0..20)) {
            let mut writer = csv::Writer::from_writer(Vec::new());
            writer.write_record(["id", "text"]).expect("memory");
            for (id, text) in &rows {
                writer.write_record([id, text]).expect("memory");
            }
            let bytes = writer.into_inner().expect("memory");
            let read = all(&mut open(&bytes, Some("id")).expect("a header")).expect("rows");
            prop_assert_eq!(read.len(), rows.len());
            for (row, (id, text)) in read.iter().zip(&rows) {
                let row = row.content.as_ref().expect("a row");
                prop_assert_eq!(&row.text, text);
                prop_assert_eq!(row.id.as_ref(), Some(&RowId::Text(id.clone())));
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [b"text\n".as_slice(), &bytes].concat();
            let _ = open(&bytes, None).and_then(|mut reader| all(&mut reader));
        }
    }
}
