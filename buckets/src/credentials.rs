//! Shared credentials file of AWS, which `object_store` does not read.

use std::fs;
use std::io;
use std::path::PathBuf;

use crate::variables::{BucketSettingsError, BucketVariables};

/// Access key of a bucket.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketCredentials {
    /// Access key ID.
    pub key_id: String,
    /// Secret access key.
    pub secret_key: String,
    /// Session token of temporary credentials.
    pub token: Option<String>,
}

// Not derived: the credentials are secret.
impl std::fmt::Debug for BucketCredentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BucketCredentials").finish_non_exhaustive()
    }
}

/// Variables whose credentials have precedence over the file, as in the tools of AWS.
const BEFORE_FILE: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];

/// Result of a search for the shared credentials file of AWS.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CredentialsFile {
    /// Keys of the profile.
    Keys(BucketCredentials),
    /// The file has no profile `default`, and `AWS_PROFILE` is not set; other sources of credentials are used.
    NoDefaultProfile(PathBuf),
    /// Variables have credentials, or there is no file.
    Unused,
}

/// Name of the profile that is used if no other one is selected.
const DEFAULT: &str = "default";

impl BucketCredentials {
    /// Parses the shared credentials file of AWS: the keys of the profile `default`.
    pub fn parse(text: &str) -> Result<BucketCredentials, String> {
        BucketCredentials::parse_profile(text, DEFAULT)
    }

    /// Parses the keys of a profile.
    fn parse_profile(text: &str, profile: &str) -> Result<BucketCredentials, String> {
        let (mut key_id, mut secret_key, mut token) = (None, None, None);
        let mut is_selected = profile == DEFAULT;
        for line in text.lines().map(str::trim) {
            if let Some(name) = section(line) {
                is_selected = name == profile;
                continue;
            }
            let Some((name, value)) =
                line.split_once('=').filter(|_| is_selected && !line.starts_with(['#', ';']))
            else {
                continue;
            };
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
        let missing = |name| {
            format!("has no {name} in the profile [{profile}]; write the format of ~/.aws/credentials")
        };
        Ok(BucketCredentials {
            key_id: key_id.ok_or_else(|| missing("aws_access_key_id"))?,
            secret_key: secret_key.ok_or_else(|| missing("aws_secret_access_key"))?,
            token,
        })
    }
}

impl CredentialsFile {
    /// Reads the file that `AWS_SHARED_CREDENTIALS_FILE` names, or else `~/.aws/credentials`, in the profile `AWS_PROFILE`.
    ///
    /// # Errors
    ///
    /// When a file or a profile that a variable names does not exist, or the profile has no keys.
    pub(crate) fn read(variables: &BucketVariables) -> Result<CredentialsFile, BucketSettingsError> {
        if BEFORE_FILE.iter().any(|name| variables.get(name).is_some()) {
            return Ok(CredentialsFile::Unused);
        }
        let named = variables.get("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
        let selected = variables.get("AWS_PROFILE");
        let Some(path) = named.clone().or_else(|| variables.home(".aws/credentials")) else {
            return Ok(CredentialsFile::Unused);
        };
        let failed = |problem: String| BucketSettingsError(format!("{} {problem}", path.display()));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && named.is_none() && selected.is_none() =>
            {
                return Ok(CredentialsFile::Unused);
            }
            Err(error) => {
                let profile =
                    selected.map(|profile| format!("; the profile [{profile}] of AWS_PROFILE is in it"));
                return Err(failed(format!("cannot be read: {error}{}", profile.unwrap_or_default())));
            }
        };
        let profile = selected.unwrap_or(DEFAULT);
        if !has_profile(&text, profile) {
            return match selected {
                Some(profile) => Err(failed(format!(
                    "has no profile [{profile}], which AWS_PROFILE selects; add it with aws_access_key_id and \
                     aws_secret_access_key, or unset AWS_PROFILE"
                ))),
                None => Ok(CredentialsFile::NoDefaultProfile(path)),
            };
        }
        BucketCredentials::parse_profile(&text, profile).map(CredentialsFile::Keys).map_err(failed)
    }
}

/// Returns the name of the profile that begins with this line.
fn section(line: &str) -> Option<&str> {
    Some(line.strip_prefix('[')?.trim_end_matches(']').trim())
}

/// Returns whether a file has a profile. Keys before the first section belong to the default one.
fn has_profile(text: &str, profile: &str) -> bool {
    let mut lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';']));
    let begins_without_section =
        profile == DEFAULT && lines.clone().next().is_some_and(|line| section(line).is_none());
    begins_without_section || lines.any(|line| section(line) == Some(profile))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# mine\n[other]\naws_access_key_id = X\naws_secret_access_key = Y\naws_session_token = Z\n\
                        [default]\naws_access_key_id = A\naws_secret_access_key=b=c\n";

    #[test]
    fn credentials_are_those_of_the_profile_and_are_not_shown() {
        let keys = |profile: &str| {
            let BucketCredentials { key_id, secret_key, token } =
                BucketCredentials::parse_profile(FILE, profile).unwrap();
            (key_id, secret_key, token)
        };
        assert_eq!(keys("default"), ("A".to_owned(), "b=c".to_owned(), None));
        assert_eq!(keys("other"), ("X".to_owned(), "Y".to_owned(), Some("Z".to_owned())));
        let problem = BucketCredentials::parse("[default]\naws_access_key_id = A\n").unwrap_err();
        assert!(problem.contains("no aws_secret_access_key"), "{problem}");
        assert!(!format!("{:?}", BucketCredentials::parse(FILE)).contains("b=c"));
    }

    #[test]
    fn variables_have_precedence_over_the_file_and_a_named_file_must_exist() {
        let of = |list: &[(&str, &str)]| {
            let list = list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            CredentialsFile::read(&list.collect())
        };
        let home = ("HOME", "/no/such/folder");
        assert_eq!(of(&[home]), Ok(CredentialsFile::Unused));
        let named = ("AWS_SHARED_CREDENTIALS_FILE", "/no/such/file");
        assert_eq!(of(&[("AWS_ACCESS_KEY_ID", "a"), named]), Ok(CredentialsFile::Unused));
        assert!(of(&[named]).unwrap_err().to_string().contains("/no/such/file cannot be read"));
        let problem = of(&[home, ("AWS_PROFILE", "prod")]).unwrap_err().to_string();
        assert!(problem.contains("/no/such/folder/.aws/credentials cannot be read"), "{problem}");
        assert!(problem.contains("[prod]"), "{problem}");
    }

    #[test]
    fn a_selected_profile_must_exist_and_a_default_one_need_not() {
        let path = std::env::temp_dir().join(format!("meridian-profiles-{}", std::process::id()));
        let of = |text: &str, profile: Option<&str>| {
            fs::write(&path, text).unwrap();
            let file = ("AWS_SHARED_CREDENTIALS_FILE".to_owned(), path.to_str().unwrap().to_owned());
            let profile = profile.map(|profile| ("AWS_PROFILE".to_owned(), profile.to_owned()));
            CredentialsFile::read(&[file].into_iter().chain(profile).collect())
        };
        let keys = "aws_access_key_id = A\naws_secret_access_key = B\n";
        let other = format!("# mine\n[other]\n{keys}");
        assert_eq!(of(&other, None), Ok(CredentialsFile::NoDefaultProfile(path.clone())));
        assert!(matches!(of(&other, Some("other")), Ok(CredentialsFile::Keys(_))));
        assert!(matches!(of(keys, None), Ok(CredentialsFile::Keys(_))), "a file without sections");
        for profile in ["prod", "default"] {
            let problem = of(&other, Some(profile)).unwrap_err().to_string();
            let expected = format!("{} has no profile [{profile}]", path.display());
            assert!(problem.contains(&expected), "{problem}");
        }
        assert!(of("[default]\nregion = eu\n", None).is_err(), "a profile without keys");
        fs::remove_file(path).unwrap();
    }
}
