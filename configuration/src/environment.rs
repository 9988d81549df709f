//! Environment variables of a process, as a value.

use std::collections::BTreeMap;
use std::ffi::OsString;

/// Environment variables.
///
/// A process may have variables that are not UTF-8. `std::env::vars` panics because of them, also where nothing reads them; here
/// only a variable that is read is a problem.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, Option<String>>);

/// Problem of a variable whose value is not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotUtf8;

impl Environment {
    /// Returns the variables of this process.
    pub fn of_process() -> Environment {
        std::env::vars_os().collect()
    }

    /// Returns the value of a variable; `None` if it is not set.
    pub fn get(&self, name: &str) -> Option<Result<&str, NotUtf8>> {
        self.0.get(name).map(|value| value.as_deref().ok_or(NotUtf8))
    }
}

impl<N: Into<OsString>, V: Into<OsString>> FromIterator<(N, V)> for Environment {
    /// Leaves out the variables whose name is not UTF-8: no configuration can name them.
    fn from_iter<I: IntoIterator<Item = (N, V)>>(variables: I) -> Environment {
        let pair =
            |(name, value): (N, V)| Some((name.into().into_string().ok()?, value.into().into_string().ok()));
        Environment(variables.into_iter().filter_map(pair).collect())
    }
}

// Not derived: the values may be secret.
impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl std::fmt::Display for NotUtf8 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("is not UTF-8; set it to a text in UTF-8")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn variables_that_are_not_utf_8_do_not_hide_the_others() {
        let invalid = || OsString::from_vec(vec![b'a', 0xff]);
        let variables: [(OsString, OsString); 3] =
            [("PLAIN".into(), "text".into()), ("BROKEN".into(), invalid()), (invalid(), "text".into())];
        let environment: Environment = variables.into_iter().collect();
        assert_eq!(environment.get("PLAIN"), Some(Ok("text")));
        assert_eq!(environment.get("BROKEN"), Some(Err(NotUtf8)));
        assert_eq!(environment.get("OTHER"), None);
        assert_eq!(format!("{environment:?}"), r#"["BROKEN", "PLAIN"]"#);
    }
}
