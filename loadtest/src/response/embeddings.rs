//! Validation of embeddings responses in one pass over the bytes.
//!
//! Such a response consists mostly of digits, and parsing them would cost more than everything else that a request
//! costs the generator. Rows in plain notation are therefore only counted in place ([`row`]), by the same pass that
//! validates the JSON; rows in any other notation are parsed number by number. Both paths accept the same rows, and
//! both agree with a general JSON parser: property tests compare them.

use super::{ResponseDefect, row};
use crate::scan::{DecodeError, JsonScanner};

/// Row of a response, unparsed.
struct ResponseRow<'a> {
    index: u64,
    dimensions: usize,
    finite: bool,
    /// Including the brackets.
    text: &'a [u8],
}

/// Properties of a list of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RowShape {
    dimensions: usize,
    finite: bool,
}

/// Validates a response to `inputs` inputs; returns the numbers per row. `is_expected` is called with the index and
/// the text of each row, so that rows are parsed only where their values matter.
pub(crate) fn check(
    body: &[u8],
    inputs: usize,
    is_expected: impl Fn(usize, &[u8]) -> bool,
) -> Result<usize, ResponseDefect> {
    let rows = rows(body, inputs).map_err(|wrong| match wrong {
        DecodeError::NotJson | DecodeError::NotBase64 => ResponseDefect::NotJson,
        DecodeError::Shape(_) | DecodeError::Index(_) => ResponseDefect::WrongShape,
        DecodeError::Count { .. } => ResponseDefect::WrongCount,
        DecodeError::Dimensions { .. } => ResponseDefect::WrongDimensions,
        DecodeError::NotFinite => ResponseDefect::NotFinite,
    })?;
    if rows.len() != inputs {
        return Err(ResponseDefect::WrongCount);
    }
    if rows.iter().zip(0..).any(|(row, index)| row.index != index) {
        return Err(ResponseDefect::WrongOrder);
    }
    let dimensions = rows.first().map_or(0, |row| row.dimensions);
    if dimensions == 0 || rows.iter().any(|row| row.dimensions != dimensions) {
        return Err(ResponseDefect::WrongDimensions);
    }
    if rows.iter().any(|row| !row.finite) {
        return Err(ResponseDefect::NotFinite);
    }
    if !rows.iter().enumerate().all(|(index, row)| is_expected(index, row.text)) {
        return Err(ResponseDefect::Unexpected);
    }
    Ok(dimensions)
}

/// Parses the numbers of a row.
pub(crate) fn numbers(row: &[u8]) -> Option<Vec<Option<f32>>> {
    serde_json::from_slice(row).ok()
}

/// Returns all rows of a response; `likely` is the expected number.
fn rows(body: &[u8], likely: usize) -> Result<Vec<ResponseRow<'_>>, DecodeError> {
    let mut cursor = JsonScanner::new(body);
    let mut rows = None;
    cursor.require(b'{', "object")?;
    cursor.object(|key, cursor| {
        if key != b"data" {
            return cursor.skip();
        }
        if rows.is_some() || cursor.peek()? != b'[' {
            return Err(DecodeError::Shape("one list under `data`"));
        }
        let rows = rows.insert(Vec::with_capacity(likely));
        cursor.list(|cursor| parse_row(cursor).map(|row| rows.push(row)))
    })?;
    cursor.end()?;
    rows.ok_or(DecodeError::Shape("`data`"))
}

/// Parses one element of `data`.
fn parse_row<'a>(cursor: &mut JsonScanner<'a>) -> Result<ResponseRow<'a>, DecodeError> {
    let (mut index, mut row) = (None, None);
    cursor.require(b'{', "object")?;
    cursor.object(|key, cursor| {
        match key {
            b"index" if index.is_none() => index = Some(cursor.count("number under `index`")?),
            b"embedding" if row.is_none() => row = Some(parse_numbers(cursor)?),
            b"index" | b"embedding" => return Err(DecodeError::Shape("one of each in a row")),
            _ => cursor.skip()?,
        }
        Ok(())
    })?;
    let index = index.ok_or(DecodeError::Shape("`index`"))?;
    let (text, RowShape { dimensions, finite }) = row.ok_or(DecodeError::Shape("`embedding`"))?;
    Ok(ResponseRow { index, dimensions, finite, text })
}

/// Parses a list of numbers.
fn parse_numbers<'a>(cursor: &mut JsonScanner<'a>) -> Result<(&'a [u8], RowShape), DecodeError> {
    cursor.require(b'[', "list under `embedding`")?;
    if let Some(row::PlainRow { numbers, bytes }) = row::count_plain(&cursor.rest()[1..]) {
        return Ok((cursor.advance(1 + bytes), RowShape { dimensions: numbers, finite: true }));
    }
    let from = cursor.rest();
    let shape = parse_any_notation(cursor)?;
    Ok((&from[..from.len() - cursor.rest().len()], shape))
}

/// Parses a list whose numbers are in any notation.
fn parse_any_notation(cursor: &mut JsonScanner<'_>) -> Result<RowShape, DecodeError> {
    let mut shape = RowShape { dimensions: 0, finite: true };
    cursor.list(|cursor| {
        shape.dimensions += 1;
        match cursor.peek()? {
            // JavaScript serializes NaN as `null`.
            b'n' => {
                cursor.skip()?;
                shape.finite = false;
            }
            b'-' | b'0'..=b'9' => {
                // A number beyond the range of f32 becomes infinite here.
                let number: f32 = cursor.number()?.parse().map_err(|_| DecodeError::NotJson)?;
                shape.finite &= number.is_finite();
            }
            _ => {
                cursor.skip()?;
                return Err(DecodeError::Shape("number in a row"));
            }
        }
        Ok(())
    })?;
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    #[test]
    fn a_row_is_a_list_of_numbers() {
        let check = |row: &str, expected: Result<(usize, bool), ResponseDefect>| {
            let body = format!(r#"{{"data":[{{"index":0,"embedding":{row}}}]}}"#);
            let got = rows(body.as_bytes(), 1).map(|rows| (rows[0].dimensions, rows[0].finite, rows[0].text));
            let expected = expected.ok().map(|(dimensions, finite)| (dimensions, finite, row.as_bytes()));
            assert_eq!(got.ok(), expected, "{row}");
        };
        check("[1,2,3]", Ok((3, true)));
        check("[]", Ok((0, true)));
        check("[ 1 , 2 ]", Ok((2, true)));
        check("[1,null]", Ok((2, false)));
        check("[1e39]", Ok((1, false)));
        check("[1e400]", Ok((1, false)));
        check("[1e-9,-0.5E+3]", Ok((2, true)));
        for wrong in [
            "\"AAAA\"",
            "[[1],[2]]",
            "[\"1\"]",
            "{}",
            "1",
            "[1,]",
            "[01]",
            "[1 2]",
            "[1.]",
            "[nul]",
            "[true]",
        ] {
            check(wrong, Err(ResponseDefect::WrongShape));
        }
        // 38 digits fit in f32, 39 do not; at every alignment.
        for before in 0..140 {
            let with = |digits: usize| format!("[{}0.5,{},1]", "1,".repeat(before), "9".repeat(digits));
            check(&with(38), Ok((before + 3, true)));
            check(&with(39), Ok((before + 3, false)));
        }
    }

    /// Reference implementation of `check` with a general parser, without reasons.
    fn parsed(body: &[u8], inputs: usize) -> Option<usize> {
        let body: Value = serde_json::from_slice(body).ok()?;
        let data = body.get("data")?.as_array().filter(|data| data.len() == inputs)?;
        let mut dimensions = None;
        for (index, row) in data.iter().enumerate() {
            let numbers = row.get("embedding")?.as_array()?;
            let finite = |number: &Value| number.as_f64().is_some_and(|number| (number as f32).is_finite());
            let is_expected = row.get("index")?.as_u64() == Some(index as u64) && numbers.iter().all(finite);
            if !is_expected || *dimensions.get_or_insert(numbers.len()) != numbers.len() {
                return None;
            }
        }
        dimensions.filter(|dimensions| *dimensions > 0)
    }

    fn number() -> impl Strategy<Value = String> {
        prop_oneof![
            6 => (-1.0_f32..1.0).prop_map(|n| format!("{n}")),
            3 => (-1.0_f64..1.0).prop_map(|n| format!("{n}")),
            1 => any::<f32>().prop_filter("finite", |n| n.is_finite()).prop_map(|n| serde_json::json!(n).to_string()),
            1 => any::<f64>().prop_filter("finite", |n| n.is_finite()).prop_map(|n| serde_json::json!(n).to_string()),
            1 => "[1-9][0-9]{0,45}",
        ]
    }

    /// Generates responses of two rows, mostly valid.
    fn response() -> impl Strategy<Value = String> {
        let rows = (1_usize..60).prop_flat_map(|numbers| {
            prop::collection::vec(prop::collection::vec(number(), numbers..=numbers), 2)
        });
        (rows, prop::sample::select(vec![",", ", ", " ,\n"])).prop_map(|(rows, between)| {
            let row = |index: usize| {
                format!(
                    r#"{{"object":"embedding","embedding":[{}],"index":{index}}}"#,
                    rows[index].join(between)
                )
            };
            format!(r#"{{"data":[{},{}],"model":"m\u00e9","usage":{{"total_tokens":12}}}}"#, row(0), row(1))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn validation_agrees_with_a_general_parser(body in response()) {
            prop_assert_eq!(super::super::check(body.as_bytes(), 2).ok(), parsed(body.as_bytes(), 2), "{}", body);
        }

        #[test]
        fn validation_agrees_with_a_general_parser_for_corrupted_responses(
            body in response(),
            index in any::<prop::sample::Index>(),
            byte in prop_oneof![
                prop::sample::select(b"0123456789-+.eE,[]{}:\"\\ nul\x01\xc3".to_vec()),
                any::<u8>(),
            ],
            cut in any::<bool>(),
        ) {
            let mut body = body.into_bytes();
            let index = index.index(body.len());
            if cut { body.truncate(index) } else { body[index] = byte }
            let got = super::super::check(&body, 2).ok();
            prop_assert_eq!(got, parsed(&body, 2), "{}", String::from_utf8_lossy(&body));
        }
    }
}
