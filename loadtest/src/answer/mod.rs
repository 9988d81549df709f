//! Is this body an answer? Rows are counted and looked at, and none is kept.
//!
//! A server under load does not only refuse: a broken one answers 200 with rows missing, in another order, cut short
//! or not finite. Such an answer is a failed request with its own name in the report ([`Rubbish`]), since a tool that
//! counts status codes would call it a success. Numbers are walked over without storing them where nobody wants to know
//! their values, because checking happens on the machine that must also send the next request in time.

pub(crate) mod embeddings;
mod masks;
pub(crate) mod rerank;
mod row;

use std::fmt;

use serde_json::error::Category;

/// What is wrong with an answer that had status 200.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rubbish {
    /// The body is not JSON, or ends too early.
    NotJson,
    /// JSON, but not a list of embeddings, or of scores.
    WrongShape,
    /// More or fewer rows than inputs.
    WrongCount,
    /// A row does not belong to the input at its place, or a document is there twice.
    WrongOrder,
    /// A row is empty, or has another length than the rows before it in this run.
    WrongDimensions,
    /// A number is null, or too large to be one.
    NotFinite,
    /// A row is another one than was expected.
    Unexpected,
    /// Not an answer of HTTP.
    NotHttp,
    /// More bytes than are read of one answer.
    TooLarge,
}

impl fmt::Display for Rubbish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rubbish::NotJson => "not JSON, or cut short",
            Rubbish::WrongShape => "not a list of embeddings or scores",
            Rubbish::WrongCount => "wrong number of rows",
            Rubbish::WrongOrder => "rows out of order",
            Rubbish::WrongDimensions => "rows of different lengths",
            Rubbish::NotFinite => "numbers that are not finite",
            Rubbish::Unexpected => "rows other than the expected ones",
            Rubbish::NotHttp => "not HTTP",
            Rubbish::TooLarge => "too many bytes",
        })
    }
}

/// How many numbers each row of `body` has, if it is an answer to `inputs` inputs.
pub fn check(body: &[u8], inputs: usize) -> Result<usize, Rubbish> {
    embeddings::check(body, inputs, |_, _| true)
}

fn kind(error: &serde_json::Error) -> Rubbish {
    match error.classify() {
        Category::Io | Category::Syntax | Category::Eof => Rubbish::NotJson,
        Category::Data => Rubbish::WrongShape,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(rows: &[(usize, &str)]) -> String {
        let rows: Vec<String> = rows
            .iter()
            .map(|(index, row)| format!(r#"{{"object":"embedding","index":{index},"embedding":{row}}}"#))
            .collect();
        format!(r#"{{"object":"list","data":[{}],"model":"m","usage":{{"total_tokens":1}}}}"#, rows.join(","))
    }

    #[test]
    fn an_answer_has_a_row_per_input_in_order_with_finite_numbers_and_one_length() {
        let good = body(&[(0, "[1.0,-2,3e-7]"), (1, "[0,0,0.5]")]);
        assert_eq!(check(good.as_bytes(), 2), Ok(3));
        for (wrong, expected) in [
            (body(&[(0, "[1,2,3]")]), Rubbish::WrongCount),
            (body(&[(0, "[1]"), (1, "[1]"), (2, "[1]")]), Rubbish::WrongCount),
            (body(&[(1, "[1]"), (0, "[1]")]), Rubbish::WrongOrder),
            (body(&[(0, "[1,2,3]"), (1, "[1,2]")]), Rubbish::WrongDimensions),
            (body(&[(0, "[]"), (1, "[]")]), Rubbish::WrongDimensions),
            (body(&[(0, "[1]"), (1, "[null]")]), Rubbish::NotFinite),
            (body(&[(0, "[1]"), (1, "[1e39]")]), Rubbish::NotFinite),
            (body(&[(0, "[1]"), (1, "[NaN]")]), Rubbish::NotJson),
            (body(&[(0, "[1]"), (1, "[\"1\"]")]), Rubbish::WrongShape),
            (good[..good.len() - 1].to_owned(), Rubbish::NotJson),
            ("{\"data\":{}}".to_owned(), Rubbish::WrongShape),
            ("{}".to_owned(), Rubbish::WrongShape),
            (String::new(), Rubbish::NotJson),
        ] {
            assert_eq!(check(wrong.as_bytes(), 2), Err(expected), "{wrong}");
        }
    }
}
