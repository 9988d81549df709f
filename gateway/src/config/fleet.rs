//! Fleet token of the gateway: it authenticates the gateway to its hubs, which wait for it when a residency policy is
//! widened.

use scheduler_core::token::Token;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Reads the token from this file or this environment variable; without either, the gateway has none.
pub(super) fn read(
    file: Option<PathBuf>,
    variable: Option<String>,
    base: &Path,
    environment: &BTreeMap<String, String>,
) -> Result<Option<Token>, String> {
    let (key, text) = match (file, variable) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            return Err("fleet_token_file and fleet_token_env are both set; remove one".to_owned());
        }
        (Some(path), None) => {
            let key = format!("fleet_token_file = \"{}\"", path.display());
            let text = std::fs::read_to_string(base.join(path));
            (key.clone(), text.map_err(|error| format!("{key} cannot be read: {error}"))?)
        }
        (None, Some(variable)) => {
            let key = format!("fleet_token_env = \"{variable}\"");
            let text = environment.get(&variable);
            (key.clone(), text.cloned().ok_or_else(|| format!("{key} is not set in the environment"))?)
        }
    };
    Token::read(&text).map(Some).map_err(|problem| format!("{key} {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_has_one_source_and_a_minimum_length() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "0123456789abcdef\n").unwrap();
        let environment = [("TOKEN", "fedcba9876543210"), ("SHORT", "secret")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let read = |file: Option<&str>, variable: Option<&str>| {
            read(file.map(PathBuf::from), variable.map(str::to_owned), dir.path(), &environment)
        };
        let shown = |token: Option<Token>| token.map(|token| token.secret().to_owned());
        assert_eq!(read(None, None).map(shown), Ok(None));
        assert_eq!(read(Some("token"), None).map(shown), Ok(Some("0123456789abcdef".to_owned())));
        assert_eq!(read(None, Some("TOKEN")).map(shown), Ok(Some("fedcba9876543210".to_owned())));
        for (file, variable, part) in [
            (Some("token"), Some("TOKEN"), "both set"),
            (Some("gone"), None, "cannot be read"),
            (None, Some("GONE"), "not set"),
            (None, Some("SHORT"), "has 6 bytes"),
        ] {
            let problem = read(file, variable).unwrap_err();
            assert!(problem.contains(part) && !problem.contains("secret"), "{problem}");
        }
    }
}
