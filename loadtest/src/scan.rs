//! JSON scanner that does not build values.
//!
//! An embeddings response is a few words around hundreds of kilobytes of digits. A general parser would first copy
//! them into strings; this one finds the end of a string with `memchr` and returns the bytes in place. Values that are
//! not requested are skipped and checked for well-formedness: a response that is not JSON, is truncated, or continues
//! after its end is [`DecodeError::NotJson`]. The client decodes responses with it, and the load generator validates
//! them with it. (The gateway's scanner of request bodies has other rules: it counts instead of returning values, and
//! leaves their validation to the replica.)

/// Maximum nesting depth of skipped values.
const DEPTH_MAX: u32 = 64;

/// Defect in the body of a response with a success status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The body of the response is not JSON, or is incomplete.
    #[error("not JSON, or truncated")]
    NotJson,
    /// The response is JSON, but this value is missing or has another type.
    #[error("missing or invalid {0}")]
    Shape(&'static str),
    /// The response has more or fewer rows than the request has inputs.
    #[error("{got} rows for {expected} inputs")]
    Count {
        /// Number of inputs.
        expected: usize,
        /// Number of rows; counting stops at one too many.
        got: usize,
    },
    /// The response has a row for an input that does not exist, or two rows for one input.
    #[error("row with index {0}, which is out of range or a duplicate")]
    Index(usize),
    /// A row of the response has another length than requested, or than the first row.
    #[error("row of {got} numbers, expected {expected}")]
    Dimensions {
        /// Expected length.
        expected: usize,
        /// Length of this row.
        got: usize,
    },
    /// A row of the response is not base64 of whole numbers.
    #[error("row that is not base64 of 32-bit numbers")]
    NotBase64,
    /// The response has a number that is not finite.
    #[error("number that is not finite")]
    NotFinite,
}

/// Position in a JSON text.
pub(crate) struct JsonScanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// JSON string in place, without its quotes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JsonString<'a> {
    pub(crate) raw: &'a [u8],
    pub(crate) escaped: bool,
}

impl JsonString<'_> {
    /// Unescapes the string.
    pub(crate) fn to_text(self) -> Result<String, DecodeError> {
        let mut quoted = Vec::with_capacity(self.raw.len() + 2);
        quoted.push(b'"');
        quoted.extend_from_slice(self.raw);
        quoted.push(b'"');
        serde_json::from_slice(&quoted).map_err(|_| DecodeError::NotJson)
    }
}

impl<'a> JsonScanner<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> JsonScanner<'a> {
        JsonScanner { bytes, at: 0 }
    }

    /// Returns a second cursor at the same position.
    pub(crate) fn fork(&self) -> JsonScanner<'a> {
        JsonScanner { bytes: self.bytes, at: self.at }
    }

    /// Returns the next byte that is not whitespace, without consuming it.
    pub(crate) fn peek(&mut self) -> Result<u8, DecodeError> {
        while let Some(byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(*byte);
            }
            self.at += 1;
        }
        Err(DecodeError::NotJson)
    }

    /// Consumes `byte` if it is next; returns whether it was.
    pub(crate) fn take(&mut self, byte: u8) -> Result<bool, DecodeError> {
        let there = self.peek()? == byte;
        self.at += usize::from(there);
        Ok(there)
    }

    /// Consumes `byte`, which must be next.
    pub(crate) fn expect(&mut self, byte: u8) -> Result<(), DecodeError> {
        if self.take(byte)? { Ok(()) } else { Err(DecodeError::NotJson) }
    }

    /// Enters an object or a list; returns whether it has an element.
    fn open(&mut self, open: u8, close: u8) -> Result<bool, DecodeError> {
        self.expect(open)?;
        Ok(!self.take(close)?)
    }

    /// Called after an element; returns whether another one follows.
    pub(crate) fn more(&mut self, close: u8) -> Result<bool, DecodeError> {
        if self.take(b',')? {
            return Ok(true);
        }
        self.expect(close)?;
        Ok(false)
    }

    /// Consumes a key and its colon.
    fn key(&mut self) -> Result<&'a [u8], DecodeError> {
        let key = self.string()?;
        self.expect(b':')?;
        Ok(key.raw)
    }

    /// Consumes an object: `visit` is called with each key, before its value.
    pub(crate) fn object(
        &mut self,
        mut visit: impl FnMut(&'a [u8], &mut JsonScanner<'a>) -> Result<(), DecodeError>,
    ) -> Result<(), DecodeError> {
        let mut more = self.open(b'{', b'}')?;
        while more {
            let key = self.key()?;
            visit(key, self)?;
            more = self.more(b'}')?;
        }
        Ok(())
    }

    /// Consumes a list: `visit` is called before each element.
    pub(crate) fn list(
        &mut self,
        mut visit: impl FnMut(&mut JsonScanner<'a>) -> Result<(), DecodeError>,
    ) -> Result<(), DecodeError> {
        let mut more = self.open(b'[', b']')?;
        while more {
            visit(self)?;
            more = self.more(b']')?;
        }
        Ok(())
    }

    /// Checks that `first` is next; `expected` names the value that it starts.
    pub(crate) fn require(&mut self, first: u8, expected: &'static str) -> Result<(), DecodeError> {
        if self.peek()? == first { Ok(()) } else { Err(DecodeError::Shape(expected)) }
    }

    /// Returns the bytes that are not consumed yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// Consumes and returns this number of bytes.
    pub(crate) fn advance(&mut self, bytes: usize) -> &'a [u8] {
        let rest = self.rest();
        let passed = &rest[..bytes.min(rest.len())];
        self.at += passed.len();
        passed
    }

    /// Consumes a string.
    pub(crate) fn string(&mut self) -> Result<JsonString<'a>, DecodeError> {
        self.expect(b'"')?;
        let begin = self.at;
        let mut escaped = false;
        loop {
            let rest = self.bytes.get(self.at..).ok_or(DecodeError::NotJson)?;
            let found = memchr::memchr2(b'"', b'\\', rest).ok_or(DecodeError::NotJson)?;
            if rest[found] == b'"' {
                let raw = &self.bytes[begin..self.at + found];
                self.at += found + 1;
                let quoted = JsonString { raw, escaped };
                // Most strings are plain ASCII; escapes and other characters are validated by serde. Without a branch
                // the loop is vectorized.
                let odd = raw.iter().fold(false, |odd, byte| odd | !(b' '..0x80).contains(byte));
                let plain = !escaped && !odd;
                return if plain { Ok(quoted) } else { quoted.to_text().map(|_| quoted) };
            }
            escaped = true;
            self.at += found + 2;
        }
    }

    /// Consumes a number and returns its text.
    pub(crate) fn number(&mut self) -> Result<&'a str, DecodeError> {
        self.peek()?;
        let rest = &self.bytes[self.at..];
        let number = &rest[..number(rest).ok_or(DecodeError::NotJson)?];
        self.at += number.len();
        std::str::from_utf8(number).map_err(|_| DecodeError::NotJson)
    }

    /// Consumes a non-negative integer.
    pub(crate) fn count(&mut self, expected: &'static str) -> Result<u64, DecodeError> {
        self.number()?.parse().map_err(|_| DecodeError::Shape(expected))
    }

    /// Consumes a finite number.
    pub(crate) fn float(&mut self) -> Result<f32, DecodeError> {
        // JSON has no notation for NaN; serializers write `null`, and some `NaN` or `Infinity`.
        if matches!(self.peek()?, b'n' | b'N' | b'I') {
            return Err(DecodeError::NotFinite);
        }
        let number: f32 = self.number()?.parse().map_err(|_| DecodeError::NotJson)?;
        if number.is_finite() { Ok(number) } else { Err(DecodeError::NotFinite) }
    }

    /// Consumes any value.
    pub(crate) fn skip(&mut self) -> Result<(), DecodeError> {
        self.skip_within(DEPTH_MAX)
    }

    fn skip_within(&mut self, depth: u32) -> Result<(), DecodeError> {
        let depth = depth.checked_sub(1).ok_or(DecodeError::Shape("value within the nesting limit"))?;
        match self.peek()? {
            b'"' => self.string().map(drop),
            b'{' => self.object(|_, scanner| scanner.skip_within(depth)),
            b'[' => self.list(|scanner| scanner.skip_within(depth)),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.number().map(drop),
        }
    }

    fn word(&mut self, word: &[u8]) -> Result<(), DecodeError> {
        let there = self.rest().starts_with(word);
        self.at += word.len();
        if there { Ok(()) } else { Err(DecodeError::NotJson) }
    }

    /// Checks that only whitespace follows.
    pub(crate) fn end(&mut self) -> Result<(), DecodeError> {
        match self.peek() {
            Err(_) => Ok(()),
            Ok(_) => Err(DecodeError::NotJson),
        }
    }
}

/// Returns the length of the number at the front in the grammar of RFC 8259; `None` if there is none.
fn number(text: &[u8]) -> Option<usize> {
    let digits = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let is = |at: usize, bytes: &[u8]| text.get(at).is_some_and(|byte| bytes.contains(byte));
    let begin = usize::from(is(0, b"-"));
    let mut at = match digits(begin) {
        0 => return None,
        more if more > 1 && text[begin] == b'0' => return None,
        whole => begin + whole,
    };
    if is(at, b".") {
        at += 1 + Some(digits(at + 1)).filter(|fraction| *fraction > 0)?;
    }
    if is(at, b"eE") {
        at += 1 + usize::from(is(at + 1, b"+-"));
        at += Some(digits(at)).filter(|exponent| *exponent > 0)?;
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_values_are_checked_for_well_formedness() {
        let check = |text: &str, good: bool| {
            let mut cursor = JsonScanner::new(text.as_bytes());
            let result = cursor.skip().and_then(|()| cursor.end());
            assert_eq!(result.is_ok(), good, "{text}: {result:?}");
        };
        for good in [
            r#"{"a":[1,-2.5e3,"x\"]",{}],"b":null}"#,
            " [ ] ",
            "true",
            r#""\\""#,
            "[[[[]]],false ,null]",
            "{} \n",
            "-0.5E+7",
            "[0, 10, 1e9]",
            r#""é\u00e9""#,
        ] {
            check(good, true);
        }
        for wrong in [
            "",
            "{",
            "[1,",
            "[1 2]",
            r#"{"a"}"#,
            r#"{"a":1,}"#,
            r#""x"#,
            r#""x\""#,
            "nul",
            "[tru]",
            "{}x",
            "-,",
            "[01]",
            "[1.]",
            "[.5]",
            "[+1]",
            "[1e]",
            "\"\t\"",
            r#""\x""#,
            r#"["\ud800"]"#,
        ] {
            check(wrong, false);
        }
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        check(&nested(DEPTH_MAX as usize), true);
        check(&nested(DEPTH_MAX as usize + 1), false);
    }

    #[test]
    fn a_string_is_returned_in_place() {
        let mut cursor = JsonScanner::new(br#" "a\"\u00e9b" "#);
        let string = cursor.string().unwrap();
        assert!(string.escaped);
        assert_eq!(string.to_text().unwrap(), "a\"éb");
        assert!(!JsonScanner::new(b"\"plain\"").string().unwrap().escaped);
    }
}
