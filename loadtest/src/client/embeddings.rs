//! Decoder of `POST /v1/embeddings` responses into one block of numbers.
//!
//! Each row is decoded to the position of its input, from base64 or from decimal digits, whichever the server sends.
//! The number of dimensions is that of the first row unless the caller requested a number; all rows must agree. A row
//! is accepted after its length, its index and the finiteness of its numbers were checked.

use base64_simd::{Out, STANDARD, STANDARD_NO_PAD};

use crate::scan::{DecodeError, JsonScanner, JsonString};

/// Maximum dimensions of a row: sixteen times those of the largest embedding models.
pub const DIMENSIONS_MAX: usize = 1 << 16;

const WRONG_DIMENSIONS: DecodeError = DecodeError::Shape("row of 1 to 65536 numbers");

/// Vectors of equal length, stored contiguously.
#[derive(Debug)]
pub(super) struct VectorBlock {
    texts: usize,
    dimensions: Option<usize>,
    pub(super) values: Vec<f32>,
    /// Rows of the current response that have been decoded.
    decoded: Vec<bool>,
    /// Buffer for a row between base64 and numbers.
    bytes: Vec<u8>,
}

/// Fields of a response besides its rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EmbeddingsMetadata {
    pub(super) model: String,
    pub(super) prompt_tokens: u64,
    pub(super) total_tokens: u64,
}

/// Undecoded row of a response.
enum EncodedRow<'a> {
    Base64(JsonString<'a>),
    /// Cursor positioned before the list.
    Floats(JsonScanner<'a>),
}

impl VectorBlock {
    /// Allocates a block for `texts` vectors, if the number of dimensions is known; otherwise with the first row.
    pub(super) fn new(texts: usize, dimensions: Option<usize>) -> VectorBlock {
        let values = vec![0.0; texts * dimensions.unwrap_or(0)];
        VectorBlock { texts, dimensions, values, decoded: Vec::new(), bytes: Vec::new() }
    }

    /// Returns the length of a row; 0 before the first row.
    pub(super) fn dimensions(&self) -> usize {
        self.dimensions.unwrap_or(0)
    }

    /// Decodes the response for `count` texts, starting with text `first`.
    pub(super) fn read(
        &mut self,
        first: usize,
        count: usize,
        response: &[u8],
    ) -> Result<EmbeddingsMetadata, DecodeError> {
        let mut cursor = JsonScanner::new(response);
        let mut metadata = EmbeddingsMetadata::default();
        self.decoded.clear();
        self.decoded.resize(count, false);
        let mut rows = None;
        cursor.object(|key, cursor| {
            match key {
                b"data" if rows.is_none() => rows = Some(self.rows(first, count, cursor)?),
                b"model" if cursor.peek()? == b'"' => metadata.model = cursor.string()?.to_text()?,
                b"usage" if cursor.peek()? == b'{' => usage(cursor, &mut metadata)?,
                _ => cursor.skip()?,
            }
            Ok(())
        })?;
        cursor.end()?;
        match rows.ok_or(DecodeError::Shape("`data`"))? {
            got if got != count => Err(DecodeError::Count { expected: count, got }),
            _ => Ok(metadata),
        }
    }

    fn rows(
        &mut self,
        first: usize,
        count: usize,
        cursor: &mut JsonScanner<'_>,
    ) -> Result<usize, DecodeError> {
        cursor.require(b'[', "list under `data`")?;
        let mut got = 0;
        cursor.list(|cursor| {
            got += 1;
            if got > count {
                return Err(DecodeError::Count { expected: count, got });
            }
            let (index, row) = parse_row(cursor)?;
            match self.decoded.get_mut(index) {
                Some(decoded) if !*decoded => *decoded = true,
                _ => return Err(DecodeError::Index(index)),
            }
            self.put(first + index, row)
        })?;
        Ok(got)
    }

    fn put(&mut self, index: usize, row: EncodedRow<'_>) -> Result<(), DecodeError> {
        match row {
            EncodedRow::Base64(quoted) if quoted.escaped => {
                // Some serializers escape the slash.
                let text = quoted.to_text()?;
                self.put_base64(index, text.as_bytes())
            }
            EncodedRow::Base64(quoted) => self.put_base64(index, quoted.raw),
            EncodedRow::Floats(cursor) => self.put_floats(index, cursor),
        }
    }

    fn put_base64(&mut self, index: usize, text: &[u8]) -> Result<(), DecodeError> {
        self.bytes.resize(text.len() / 4 * 3 + 3, 0);
        let variant = if text.len().is_multiple_of(4) { STANDARD } else { STANDARD_NO_PAD };
        let bytes =
            variant.decode(text, Out::from_slice(&mut self.bytes)).map_err(|_| DecodeError::NotBase64)?;
        let length = bytes.len();
        if !length.is_multiple_of(4) {
            return Err(DecodeError::NotBase64);
        }
        let dimensions = self.fix_dimensions(length / 4)?;
        let row = &mut self.values[index * dimensions..][..dimensions];
        let (numbers, _) = self.bytes[..length].as_chunks::<4>();
        // Without a branch the loop is vectorized.
        let mut finite = true;
        for (value, bytes) in row.iter_mut().zip(numbers) {
            *value = f32::from_le_bytes(*bytes);
            finite &= value.is_finite();
        }
        if finite { Ok(()) } else { Err(DecodeError::NotFinite) }
    }

    fn put_floats(&mut self, index: usize, mut cursor: JsonScanner<'_>) -> Result<(), DecodeError> {
        let Some(dimensions) = self.dimensions else {
            let mut row = Vec::new();
            cursor.list(|cursor| {
                if row.len() == DIMENSIONS_MAX {
                    return Err(WRONG_DIMENSIONS);
                }
                row.push(cursor.float()?);
                Ok(())
            })?;
            let dimensions = self.fix_dimensions(row.len())?;
            self.values[index * dimensions..][..dimensions].copy_from_slice(&row);
            return Ok(());
        };
        let row = &mut self.values[index * dimensions..][..dimensions];
        let mut got = 0;
        cursor.list(|cursor| {
            let value =
                row.get_mut(got).ok_or(DecodeError::Dimensions { expected: dimensions, got: got + 1 })?;
            *value = cursor.float()?;
            got += 1;
            Ok(())
        })?;
        if got == dimensions { Ok(()) } else { Err(DecodeError::Dimensions { expected: dimensions, got }) }
    }

    /// Checks the length of a row, or fixes it with the first row.
    fn fix_dimensions(&mut self, got: usize) -> Result<usize, DecodeError> {
        match self.dimensions {
            Some(expected) if expected == got => Ok(expected),
            Some(expected) => Err(DecodeError::Dimensions { expected, got }),
            None if got == 0 || got > DIMENSIONS_MAX => Err(WRONG_DIMENSIONS),
            None => {
                let numbers = self.texts.saturating_mul(got);
                // Fallible reservation first: a row of a wrong length must not abort the process for lack of memory.
                let fits_in_memory = Vec::<f32>::new().try_reserve_exact(numbers).is_ok();
                if !fits_in_memory {
                    return Err(DecodeError::Shape("row length that fits in memory"));
                }
                self.dimensions = Some(got);
                self.values = vec![0.0; numbers];
                Ok(got)
            }
        }
    }
}

/// Parses one element of `data` and advances the cursor past it.
fn parse_row<'a>(cursor: &mut JsonScanner<'a>) -> Result<(usize, EncodedRow<'a>), DecodeError> {
    cursor.require(b'{', "object in `data`")?;
    let (mut index, mut row) = (None, None);
    cursor.object(|key, cursor| {
        match key {
            b"index" => index = Some(cursor.count("number under `index`")? as usize),
            b"embedding" => {
                row = Some(match cursor.peek()? {
                    b'"' => EncodedRow::Base64(cursor.string()?),
                    b'[' => {
                        let list = cursor.fork();
                        cursor.skip()?;
                        EncodedRow::Floats(list)
                    }
                    _ => return Err(DecodeError::Shape("list or base64 under `embedding`")),
                });
            }
            _ => cursor.skip()?,
        }
        Ok(())
    })?;
    Ok((index.ok_or(DecodeError::Shape("`index`"))?, row.ok_or(DecodeError::Shape("`embedding`"))?))
}

fn usage(cursor: &mut JsonScanner<'_>, metadata: &mut EmbeddingsMetadata) -> Result<(), DecodeError> {
    cursor.object(|key, cursor| {
        let field = match key {
            b"prompt_tokens" => &mut metadata.prompt_tokens,
            b"total_tokens" => &mut metadata.total_tokens,
            _ => return cursor.skip(),
        };
        if !cursor.peek()?.is_ascii_digit() {
            return cursor.skip();
        }
        *field = cursor.count("count of tokens")?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD as BASE64;
    use proptest::prelude::*;

    fn base64(row: &[f32]) -> String {
        let bytes: Vec<u8> = row.iter().flat_map(|number| number.to_le_bytes()).collect();
        format!("\"{}\"", BASE64.encode(bytes))
    }

    fn response(rows: &[(usize, String)]) -> String {
        let rows: Vec<String> = rows
            .iter()
            .map(|(index, row)| format!(r#"{{"object":"embedding","embedding":{row},"index":{index}}}"#))
            .collect();
        let usage = r#""usage":{"prompt_tokens":7,"total_tokens":9,"extra":{"a":[1]}}"#;
        format!(r#"{{"object":"list","data":[{}],"model":"m\"","more":[{{}}],{usage}}}"#, rows.join(","))
    }

    fn read(body: &str, count: usize) -> Result<(Vec<f32>, EmbeddingsMetadata), DecodeError> {
        let mut block = VectorBlock::new(count, None);
        let metadata = block.read(0, count, body.as_bytes())?;
        Ok((block.values, metadata))
    }

    #[test]
    fn rows_are_assigned_to_their_inputs_in_either_encoding_and_any_order() {
        let body = response(&[(1, base64(&[0.25, -1.0e-7])), (0, "[0.1, -3e2]".to_owned())]);
        let (values, metadata) = read(&body, 2).unwrap();
        assert_eq!(values, [0.1, -300.0, 0.25, -1.0e-7]);
        assert_eq!(
            metadata,
            EmbeddingsMetadata { model: "m\"".to_owned(), prompt_tokens: 7, total_tokens: 9 }
        );
    }

    #[test]
    fn an_escaped_slash_is_a_slash() {
        let row = base64(&[f32::from_le_bytes([0xff, 0xff, 0x3f, 0x3f])]);
        assert!(row.contains('/'), "{row}");
        let (values, _) = read(&response(&[(0, row.replace('/', "\\/"))]), 1).unwrap();
        assert_eq!(values, [f32::from_le_bytes([0xff, 0xff, 0x3f, 0x3f])]);
    }

    #[test]
    fn invalid_responses_are_rejected_with_their_cause() {
        let good = |index| (index, base64(&[1.0, 2.0, 3.0]));
        let bytes = |bytes: &[u8]| format!("\"{}\"", BASE64.encode(bytes));
        for (rows, expected) in [
            (vec![good(0)], DecodeError::Count { expected: 2, got: 1 }),
            (vec![], DecodeError::Count { expected: 2, got: 0 }),
            (vec![good(0), good(1), good(2)], DecodeError::Count { expected: 2, got: 3 }),
            (vec![good(0), good(0)], DecodeError::Index(0)),
            (vec![good(0), good(2)], DecodeError::Index(2)),
            (vec![good(0), (1, base64(&[1.0, 2.0]))], DecodeError::Dimensions { expected: 3, got: 2 }),
            (vec![good(0), (1, "[1,2]".to_owned())], DecodeError::Dimensions { expected: 3, got: 2 }),
            (vec![good(0), (1, "[1,2,3,4]".to_owned())], DecodeError::Dimensions { expected: 3, got: 4 }),
            (vec![(0, "[]".to_owned()), good(1)], DecodeError::Shape("row of 1 to 65536 numbers")),
            (vec![(0, "\"\"".to_owned()), good(1)], DecodeError::Shape("row of 1 to 65536 numbers")),
            (vec![good(0), (1, base64(&[1.0, f32::NAN, 3.0]))], DecodeError::NotFinite),
            (vec![good(0), (1, base64(&[1.0, 2.0, f32::NEG_INFINITY]))], DecodeError::NotFinite),
            (vec![good(0), (1, "[1,null,3]".to_owned())], DecodeError::NotFinite),
            (vec![good(0), (1, "[1,1e39,3]".to_owned())], DecodeError::NotFinite),
            (vec![good(0), (1, "[1,NaN,3]".to_owned())], DecodeError::NotJson),
            (vec![good(0), (1, "[1,\"2\",3]".to_owned())], DecodeError::NotJson),
            (vec![good(0), (1, bytes(&[0; 11]))], DecodeError::NotBase64),
            (vec![good(0), (1, "\"AAAA!AAAAAAAAAAA\"".to_owned())], DecodeError::NotBase64),
            (vec![good(0), (1, "7".to_owned())], DecodeError::Shape("list or base64 under `embedding`")),
        ] {
            let body = response(&rows);
            assert_eq!(read(&body, 2).map(drop), Err(expected), "{body}");
        }
        for (body, expected) in [
            (r#"{"data":[{"embedding":[1]}]}"#, DecodeError::Shape("`index`")),
            (r#"{"data":[{"index":0}]}"#, DecodeError::Shape("`embedding`")),
            (r#"{"data":[{"index":-1,"embedding":[1]}]}"#, DecodeError::Shape("number under `index`")),
            (r#"{"data":{}}"#, DecodeError::Shape("list under `data`")),
            (r#"{"data":[[1.0]]}"#, DecodeError::Shape("object in `data`")),
            (r#"{"model":"m"}"#, DecodeError::Shape("`data`")),
            ("[]", DecodeError::NotJson),
            ("", DecodeError::NotJson),
        ] {
            assert_eq!(read(body, 1).map(drop), Err(expected), "{body}");
        }
    }

    #[test]
    fn rows_have_the_requested_length() {
        let body = response(&[(0, base64(&[1.0, 2.0]))]);
        assert!(VectorBlock::new(1, Some(2)).read(0, 1, body.as_bytes()).is_ok());
        let wrong = VectorBlock::new(1, Some(3)).read(0, 1, body.as_bytes());
        assert_eq!(wrong, Err(DecodeError::Dimensions { expected: 3, got: 2 }));
        let long = |length: usize| response(&[(0, format!("[{}0]", "0,".repeat(length - 1)))]);
        assert!(read(&long(DIMENSIONS_MAX), 1).is_ok());
        assert!(read(&long(DIMENSIONS_MAX + 1), 1).is_err());
    }

    proptest! {
        #[test]
        fn all_numbers_are_decoded_and_truncated_responses_are_rejected(
            rows in prop::collection::vec(prop::collection::vec(-1e30f32..1e30, 5), 1..6), as_base64 in any::<bool>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let text = |row: &Vec<f32>| if as_base64 { base64(row) } else { format!("{row:?}") };
            let body = response(&rows.iter().map(text).enumerate().collect::<Vec<_>>());
            let (values, _) = read(&body, rows.len()).expect("a valid response");
            prop_assert_eq!(values, rows.concat());
            let cut = cut.index(body.len());
            prop_assert_eq!(read(&body[..cut], rows.len()).map(drop), Err(DecodeError::NotJson), "{}", &body[..cut]);
        }
    }
}
