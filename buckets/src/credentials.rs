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

impl BucketCredentials {
    /// Parses the shared credentials file of AWS: the keys of the profile `default`.
    pub fn parse(text: &str) -> Result<BucketCredentials, String> {
        BucketCredentials::parse_profile(text, "default")
    }

    /// Parses the keys of a profile.
    fn parse_profile(text: &str, profile: &str) -> Result<BucketCredentials, String> {
        let (mut key_id, mut secret_key, mut token) = (None, None, None);
        let mut is_selected = profile == "default";
        for line in text.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix('[') {
                is_selected = name.trim_end_matches(']').trim() == profile;
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

    /// Reads the file that `AWS_SHARED_CREDENTIALS_FILE` names, or else `~/.aws/credentials`, in the profile `AWS_PROFILE`.
    /// None if variables have credentials, or if there is no file.
    pub(crate) fn of_file(
        variables: &BucketVariables,
    ) -> Result<Option<BucketCredentials>, BucketSettingsError> {
        if BEFORE_FILE.iter().any(|name| variables.get(name).is_some()) {
            return Ok(None);
        }
        let named = variables.get("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
        let Some(path) = named.clone().or_else(|| variables.home(".aws/credentials")) else {
            return Ok(None);
        };
        let failed = |problem: String| BucketSettingsError(format!("{} {problem}", path.display()));
        match fs::read_to_string(&path) {
            Ok(text) => {
                let profile = variables.get("AWS_PROFILE").unwrap_or("default");
                BucketCredentials::parse_profile(&text, profile).map(Some).map_err(failed)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => Ok(None),
            Err(error) => Err(failed(format!("cannot be read: {error}"))),
        }
    }
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
            BucketCredentials::of_file(&list.collect())
        };
        assert_eq!(of(&[("HOME", "/no/such/folder")]), Ok(None));
        let named = ("AWS_SHARED_CREDENTIALS_FILE", "/no/such/file");
        assert_eq!(of(&[("AWS_ACCESS_KEY_ID", "a"), named]), Ok(None));
        assert!(of(&[named]).unwrap_err().to_string().contains("/no/such/file cannot be read"));
    }
}
