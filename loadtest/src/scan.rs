//! Walks over JSON without building anything of it.
//!
//! An answer with embeddings is a few words around hundreds of kilobytes of digits. A parser for everything reads them
//! into strings first; this one knows where a string ends (by `memchr`) and hands out the bytes where they lie. What it is
//! not asked for it skips, and sees that it is well formed: an answer that is not JSON, ends too early, or goes on after its
//! end, is [`Wrong::NotJson`]. The client reads answers with it, and the load generator looks at them with it.

use std::fmt;

/// How deep lists and objects that nobody asked for may be nested.
const DEPTH_MAX: u32 = 64;

/// What is wrong with an answer that the server called a success.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Not JSON, or cut short.
    NotJson,
    /// JSON, but not what was asked for.
    Shape(&'static str),
    /// More or fewer rows than inputs.
    Count {
        /// How many inputs were sent.
        wanted: usize,
        /// How many rows came; one too many where it was not counted further.
        got: usize,
    },
    /// An index that no input has, or that two rows have.
    Index(usize),
    /// A row of another length than was asked for, or than the first one had.
    Dimensions {
        /// How long rows are.
        wanted: usize,
        /// How long this one is.
        got: usize,
    },
    /// A row that is not base64 of whole numbers.
    NotBase64,
    /// A number that is not finite.
    NotFinite,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::NotJson => f.write_str("not JSON, or cut short"),
            Wrong::Shape(what) => write!(f, "no {what} where one must be"),
            Wrong::Count { wanted, got } => write!(f, "{got} rows for {wanted} inputs"),
            Wrong::Index(index) => {
                write!(f, "a row with index {index}, which no input has or another row had")
            }
            Wrong::Dimensions { wanted, got } => write!(f, "a row of {got} numbers among rows of {wanted}"),
            Wrong::NotBase64 => f.write_str("a row that is not base64 of whole numbers"),
            Wrong::NotFinite => f.write_str("a number that is not finite"),
        }
    }
}

/// A place in a JSON text.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// A string as it lies in the text, without its quotes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quoted<'a> {
    pub(crate) raw: &'a [u8],
    pub(crate) escaped: bool,
}

impl Quoted<'_> {
    /// What it says.
    pub(crate) fn to_text(self) -> Result<String, Wrong> {
        let mut quoted = Vec::with_capacity(self.raw.len() + 2);
        quoted.push(b'"');
        quoted.extend_from_slice(self.raw);
        quoted.push(b'"');
        serde_json::from_slice(&quoted).map_err(|_| Wrong::NotJson)
    }
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// A second cursor at the same place.
    pub(crate) fn here(&self) -> Cursor<'a> {
        Cursor { bytes: self.bytes, at: self.at }
    }

    /// The next byte that is not space, which stays.
    pub(crate) fn peek(&mut self) -> Result<u8, Wrong> {
        while let Some(byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(*byte);
            }
            self.at += 1;
        }
        Err(Wrong::NotJson)
    }

    /// Goes past `byte` if it is next.
    pub(crate) fn take(&mut self, byte: u8) -> Result<bool, Wrong> {
        let there = self.peek()? == byte;
        self.at += usize::from(there);
        Ok(there)
    }

    /// Goes past `byte`, which must be next.
    pub(crate) fn expect(&mut self, byte: u8) -> Result<(), Wrong> {
        if self.take(byte)? { Ok(()) } else { Err(Wrong::NotJson) }
    }

    /// Goes into an object or a list; whether there is something in it.
    pub(crate) fn open(&mut self, open: u8, close: u8) -> Result<bool, Wrong> {
        self.expect(open)?;
        Ok(!self.take(close)?)
    }

    /// After an element: whether another one follows.
    pub(crate) fn more(&mut self, close: u8) -> Result<bool, Wrong> {
        if self.take(b',')? {
            return Ok(true);
        }
        self.expect(close)?;
        Ok(false)
    }

    /// A key and its colon.
    pub(crate) fn key(&mut self) -> Result<&'a [u8], Wrong> {
        let key = self.string()?;
        self.expect(b':')?;
        Ok(key.raw)
    }

    /// What has not been gone past.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// Goes past so many bytes, whatever they are, and hands them out.
    pub(crate) fn pass(&mut self, bytes: usize) -> &'a [u8] {
        let rest = self.rest();
        let passed = &rest[..bytes.min(rest.len())];
        self.at += passed.len();
        passed
    }

    /// A string.
    pub(crate) fn string(&mut self) -> Result<Quoted<'a>, Wrong> {
        self.expect(b'"')?;
        let begin = self.at;
        let mut escaped = false;
        loop {
            let rest = self.bytes.get(self.at..).ok_or(Wrong::NotJson)?;
            let found = memchr::memchr2(b'"', b'\\', rest).ok_or(Wrong::NotJson)?;
            if rest[found] == b'"' {
                let raw = &self.bytes[begin..self.at + found];
                self.at += found + 1;
                let quoted = Quoted { raw, escaped };
                // Nearly every string is plain; what an escape or a letter beyond ASCII may be is left to the parser.
                // Without a branch in it the loop is done many bytes at a time.
                let odd = raw.iter().fold(false, |odd, byte| odd | !(b' '..0x80).contains(byte));
                let plain = !escaped && !odd;
                return if plain { Ok(quoted) } else { quoted.to_text().map(|_| quoted) };
            }
            escaped = true;
            self.at += found + 2;
        }
    }

    /// A number, as it is written.
    pub(crate) fn number(&mut self) -> Result<&'a str, Wrong> {
        self.peek()?;
        let rest = &self.bytes[self.at..];
        let number = &rest[..number(rest).ok_or(Wrong::NotJson)?];
        self.at += number.len();
        std::str::from_utf8(number).map_err(|_| Wrong::NotJson)
    }

    /// A number from 0 without a fraction.
    pub(crate) fn count(&mut self, what: &'static str) -> Result<u64, Wrong> {
        self.number()?.parse().map_err(|_| Wrong::Shape(what))
    }

    /// A finite number.
    pub(crate) fn float(&mut self) -> Result<f32, Wrong> {
        // JSON has no word for what is not a number, so that writers say `null`, and some `NaN` or `Infinity`.
        if matches!(self.peek()?, b'n' | b'N' | b'I') {
            return Err(Wrong::NotFinite);
        }
        let number: f32 = self.number()?.parse().map_err(|_| Wrong::NotJson)?;
        if number.is_finite() { Ok(number) } else { Err(Wrong::NotFinite) }
    }

    /// Goes past whatever is next.
    pub(crate) fn skip(&mut self) -> Result<(), Wrong> {
        self.skip_within(DEPTH_MAX)
    }

    fn skip_within(&mut self, depth: u32) -> Result<(), Wrong> {
        let depth = depth.checked_sub(1).ok_or(Wrong::Shape("value of a sensible depth"))?;
        match self.peek()? {
            b'"' => self.string().map(drop),
            b'{' => {
                let mut more = self.open(b'{', b'}')?;
                while more {
                    self.key()?;
                    self.skip_within(depth)?;
                    more = self.more(b'}')?;
                }
                Ok(())
            }
            b'[' => {
                let mut more = self.open(b'[', b']')?;
                while more {
                    self.skip_within(depth)?;
                    more = self.more(b']')?;
                }
                Ok(())
            }
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.number().map(drop),
        }
    }

    fn word(&mut self, word: &[u8]) -> Result<(), Wrong> {
        let there = self.rest().starts_with(word);
        self.at += word.len();
        if there { Ok(()) } else { Err(Wrong::NotJson) }
    }

    /// Nothing but space follows.
    pub(crate) fn end(&mut self) -> Result<(), Wrong> {
        match self.peek() {
            Err(_) => Ok(()),
            Ok(_) => Err(Wrong::NotJson),
        }
    }
}

/// How long the number at the front is, in the grammar of RFC 8259; none if there is none.
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
    fn whatever_is_skipped_ends_where_it_ends() {
        let check = |text: &str, good: bool| {
            let mut cursor = Cursor::new(text.as_bytes());
            let went = cursor.skip().and_then(|()| cursor.end());
            assert_eq!(went.is_ok(), good, "{text}: {went:?}");
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
    fn a_string_is_handed_out_as_it_lies_there() {
        let mut cursor = Cursor::new(br#" "a\"\u00e9b" "#);
        let string = cursor.string().unwrap();
        assert!(string.escaped);
        assert_eq!(string.to_text().unwrap(), "a\"éb");
        assert!(!Cursor::new(b"\"plain\"").string().unwrap().escaped);
    }
}
