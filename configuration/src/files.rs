//! Files and environment variables that a configuration names.

use std::path::{Path, PathBuf};

use crate::document::{ConfigFile, Problem};
use crate::environment::Environment;

/// Surroundings of a configuration file.
#[derive(Clone, Copy)]
pub struct Files<'a> {
    /// Folder to which relative paths refer.
    pub base: &'a Path,
    /// Environment variables. `None` leaves out all that depends on them: a file is valid or not wherever it is checked.
    pub environment: Option<&'a Environment>,
}

impl Files<'_> {
    /// Returns a path of the configuration, resolved against the folder.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.base.join(path)
    }

    /// Reads the file that `key` names.
    pub fn text(&self, document: &ConfigFile<'_>, key: &str, path: &Path) -> Option<String> {
        let text = std::fs::read_to_string(self.path(path));
        let problem = |error| {
            document.problem(key, format!("\"{}\" cannot be read: {error}", self.path(path).display()));
        };
        text.map_err(problem).ok()
    }

    /// Reads and parses the file that `key` names; its problems are reported with its name.
    pub fn parsed<T>(
        &self,
        document: &ConfigFile<'_>,
        key: &str,
        path: &Path,
        parse: impl FnOnce(&str) -> Result<T, Vec<Problem>>,
    ) -> Option<T> {
        let text = self.text(document, key, path)?;
        parse(&text).map_err(|found| document.problems_elsewhere(&self.path(path), found)).ok()
    }

    /// Reads a secret from the file of the key `NAME_file` or the variable of `NAME_env`, of which at most one may be set.
    /// Problems that `parse` returns must not contain the secret.
    pub fn secret<T>(
        &self,
        document: &ConfigFile<'_>,
        name: &str,
        file: Option<&Path>,
        variable: Option<&str>,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let (key, source, text) = match (file, variable) {
            (None, None) => return None,
            (Some(_), Some(_)) => {
                let key = name.rsplit('.').next().unwrap_or(name);
                document.problem(
                    &format!("{name}_env"),
                    format!("{key}_file and {key}_env are both set; remove one"),
                );
                return None;
            }
            (Some(path), None) => {
                let key = format!("{name}_file");
                let text = self.text(document, &key, path)?;
                (key, path.display().to_string(), text)
            }
            (None, Some(variable)) if !is_variable_name(variable) => {
                let fix = "write letters, digits and underscores, such as \"MERIDIAN_KEY\"";
                document.problem(
                    &format!("{name}_env"),
                    format!("{variable:?} is not the name of an environment variable; {fix}"),
                );
                return None;
            }
            (None, Some(variable)) => {
                let (key, Some(environment)) = (format!("{name}_env"), self.environment) else { return None };
                let text = match environment.get(variable) {
                    Some(Ok(text)) => text.to_owned(),
                    Some(Err(problem)) => {
                        document.problem(&key, format!("the variable \"{variable}\" {problem}"));
                        return None;
                    }
                    None => {
                        document.problem(
                            &key,
                            format!("\"{variable}\" is not set in the environment; set the variable"),
                        );
                        return None;
                    }
                };
                (key, variable.to_owned(), text)
            }
        };
        parse(&text).map_err(|problem| document.problem(&key, format!("\"{source}\" {problem}"))).ok()
    }
}

/// Returns whether a text is a portable name of an environment variable (POSIX.1-2017, 8.1), in upper or lower case.
fn is_variable_name(text: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.bytes().next().is_some_and(|first| !first.is_ascii_digit()) && text.bytes().all(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_one_source_and_is_not_repeated() {
        use std::os::unix::ffi::OsStringExt;
        let not_utf_8 = std::ffi::OsString::from_vec(b"s3cret\xff".to_vec());
        let environment = [("KEY", "s3cret".into()), ("BROKEN", not_utf_8)].into_iter().collect();
        let read = |file: Option<&str>, variable: Option<&str>, environment| {
            let document = ConfigFile::parse("").expect("TOML");
            let files = Files { base: Path::new("/nowhere"), environment };
            let secret =
                files.secret(&document, "tls.key", file.map(Path::new), variable, |text| match text {
                    "s3cret" => Ok(text.len()),
                    _ => Err("is too short; make it longer".to_owned()),
                });
            (secret, document.problems().into_iter().map(|problem| problem.message).collect::<String>())
        };
        assert_eq!(read(None, Some("KEY"), Some(&environment)), (Some(6), String::new()));
        assert_eq!(read(None, None, Some(&environment)), (None, String::new()));
        assert_eq!(read(None, Some("OTHER"), None), (None, String::new()), "variables are not known");
        for (file, variable, part) in [
            (None, Some(""), "tls.key_env: \"\" is not the name of an environment variable; write letters"),
            (None, Some("2 KEYS\0"), "tls.key_env: \"2 KEYS\\0\" is not the name of an environment variable"),
            (None, Some("OTHER"), "tls.key_env: \"OTHER\" is not set in the environment; set the variable"),
            (None, Some("BROKEN"), "tls.key_env: the variable \"BROKEN\" is not UTF-8; set it"),
            (Some("gone"), None, "tls.key_file: \"/nowhere/gone\" cannot be read"),
            (Some("gone"), Some("KEY"), "key_file and key_env are both set; remove one"),
        ] {
            let (secret, problem) = read(file, variable, Some(&environment));
            assert!(secret.is_none() && problem.contains(part) && !problem.contains("s3cret"), "{problem}");
        }
    }
}
