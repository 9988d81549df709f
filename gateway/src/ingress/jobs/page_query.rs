//! Query string of a list.

use crate::respond::Rejection;
use replica_api::error::ErrorCode;

/// Parameters of a list.
pub(super) struct PageQuery<'a> {
    pub(super) limit: usize,
    after: Option<&'a str>,
    others: Vec<(&'a str, &'a str)>,
}

impl<'a> PageQuery<'a> {
    /// Reads `limit`, by default and at most of these numbers, `after`, and `others`.
    pub(super) fn read(
        query: &'a str,
        (default, max): (usize, usize),
        others: &[&str],
    ) -> Result<PageQuery<'a>, Rejection> {
        let mut page = PageQuery { limit: default, after: None, others: Vec::new() };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=max).contains(limit));
                    let expected = format!("a number from 1 to {max}");
                    page.limit = limit.ok_or_else(|| invalid_parameter("limit", value, &expected))?;
                }
                "after" => page.after = Some(value),
                name if others.contains(&name) => page.others.push((name, value)),
                _ => {
                    let name: String = name.chars().take(64).collect();
                    let known =
                        ["limit", "after"].iter().chain(others).copied().collect::<Vec<_>>().join(", ");
                    let message =
                        format!("The parameter '{name}' does not exist; the parameters are {known}.");
                    return Err(Rejection::new(ErrorCode::InvalidValue, message));
                }
            }
        }
        Ok(page)
    }

    /// Reads one of the others; none if it is absent.
    pub(super) fn parsed<T>(
        &self,
        param: &'static str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Rejection> {
        let value = self.others.iter().find(|(other, _)| *other == param).map(|(_, value)| *value);
        value.map(|value| parse(value).ok_or_else(|| invalid_parameter(param, value, expected))).transpose()
    }

    /// Reads the identifier in `after`. It may be of any region: a gateway merges the lists of several.
    pub(super) fn after_id<T>(
        &self,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, Rejection> {
        let read = |after: &str| after.split('.').next().and_then(parse);
        self.after
            .map(|after| read(after).ok_or_else(|| invalid_parameter("after", after, expected)))
            .transpose()
    }
}

fn invalid_parameter(param: &'static str, value: &str, expected: &str) -> Rejection {
    let value: String = value.chars().take(64).collect();
    let message = format!("The parameter '{param}' is '{value}'; write {expected}.");
    Rejection::new(ErrorCode::InvalidValue, message).of(param)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_and_others_are_rejected_with_the_known_ones() {
        let read = |query| PageQuery::read(query, (20, 100), &["status"]);
        let page = read("").expect("valid");
        assert_eq!((page.limit, page.after), (20, None));
        let page = read("limit=100&&status=a&after=7.aws.us-east-1").expect("valid");
        assert_eq!(page.limit, 100);
        assert_eq!(page.after_id("an id", |id| id.parse().ok()), Ok(Some(7)));
        assert_eq!(page.parsed("status", "a", |value| (value == "a").then_some(())), Ok(Some(())));
        let rejected = page.parsed("status", "b", |_| None::<()>).expect_err("invalid");
        assert_eq!(
            (rejected.message.as_str(), rejected.param),
            ("The parameter 'status' is 'a'; write b.", Some("status"))
        );
        for (query, message) in [
            ("limit=0", "The parameter 'limit' is '0'; write a number from 1 to 100."),
            ("limit=101", "The parameter 'limit' is '101'; write a number from 1 to 100."),
            ("x=1", "The parameter 'x' does not exist; the parameters are limit, after, status."),
        ] {
            assert_eq!(read(query).map(drop).expect_err("invalid").message, message);
        }
    }
}
