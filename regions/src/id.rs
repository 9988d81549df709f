//! Names: of a region, of a deployment, of a tenant.
//!
//! A region is named `cloud/name` with the provider's own name for it, because that is what stands on its invoices and
//! in its documentation; the cloud in front makes it unique (`us-east-1` alone is a region of several clouds). Names are
//! compared as written: `us-east-1` and `US-EAST-1` are two names, and a catalogue that lacks one of them offers the
//! other. They are cheap to clone, since every event and every route carries one.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Longest name of a region within its cloud, and of a cloud. The longest in use today has 20 bytes.
pub const MAX_REGION_PART_LEN: usize = 48;

/// Longest name of a deployment or a tenant: what fits a DNS label and a metric label comfortably.
pub const MAX_NAME_LEN: usize = 64;

/// A text that is not the name it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a {what}: write {wanted}")]
pub struct IdError {
    /// The kind of name that was wanted.
    pub what: &'static str,
    /// What was given instead, cut to a printable length.
    pub given: String,
    /// The form that is wanted, with an example.
    pub wanted: &'static str,
}

impl IdError {
    fn new(what: &'static str, given: &str, wanted: &'static str) -> IdError {
        IdError { what, given: given.chars().take(MAX_NAME_LEN).collect(), wanted }
    }
}

/// A region of a cloud: `cloud/name`, such as `gcp/europe-west4`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(Arc<str>);

impl RegionId {
    /// The cloud, such as `gcp`.
    pub fn cloud(&self) -> &str {
        self.parts().0
    }

    /// The provider's own name of the region, such as `europe-west4`.
    pub fn name(&self) -> &str {
        self.parts().1
    }

    /// The whole, such as `gcp/europe-west4`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').expect("a RegionId is made by from_str only, which demands the slash")
    }
}

impl FromStr for RegionId {
    type Err = IdError;

    fn from_str(text: &str) -> Result<RegionId, IdError> {
        let well_formed = text.split_once('/').is_some_and(|(cloud, name)| {
            is_name(cloud, MAX_REGION_PART_LEN) && is_name(name, MAX_REGION_PART_LEN)
        });
        if well_formed {
            Ok(RegionId(text.into()))
        } else {
            Err(IdError::new(
                "region",
                text,
                "cloud/name in letters, digits, '-', '_' and '.', such as gcp/europe-west4",
            ))
        }
    }
}

/// Whether `text` is 1 to `longest` of the characters that need no quoting in a URL, a header, a file name or a label.
fn is_name(text: &str, longest: usize) -> bool {
    (1..=longest).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

macro_rules! name_type {
    ($(#[$doc:meta])+ $type:ident, $what:literal, $example:literal) => {
        $(#[$doc])+
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $type {
            type Err = IdError;

            fn from_str(text: &str) -> Result<$type, IdError> {
                if is_name(text, MAX_NAME_LEN) {
                    Ok($type(text.into()))
                } else {
                    Err(IdError::new($what, text, concat!("1 to 64 letters, digits, '-', '_' and '.', such as ", $example)))
                }
            }
        }
    };
}

name_type! {
    /// What clients put into `model`: the name of a deployment.
    DeploymentName, "deployment name", "docs-embed"
}

name_type! {
    /// A customer, by the name that its operator gave it.
    TenantId, "tenant name", "acme-search"
}

macro_rules! shows_its_text {
    ($($type:ident),+) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        // Equality, order and hash are those of the text, so a map of names is asked with a plain &str.
        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    )+};
}

shows_its_text!(RegionId, DeploymentName, TenantId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_a_cloud_and_the_providers_own_name() {
        let id: RegionId = "gcp/europe-west4".parse().unwrap();
        assert_eq!((id.cloud(), id.name(), id.as_str()), ("gcp", "europe-west4", "gcp/europe-west4"));
        let id: RegionId = "coreweave/US-EAST-04".parse().unwrap();
        assert_eq!(id.to_string(), "coreweave/US-EAST-04");
    }

    #[test]
    fn what_is_not_a_region_says_what_a_region_looks_like() {
        let long = format!("aws/{}", "x".repeat(MAX_REGION_PART_LEN + 1));
        for text in ["", "us-east-1", "aws/", "/us-east-1", "aws/us/east", "aws/us east", "aws/zürich", &long]
        {
            let error = text.parse::<RegionId>().unwrap_err();
            assert!(error.to_string().contains("such as gcp/europe-west4"), "{text}: {error}");
        }
        assert!(format!("aws/{}", "x".repeat(MAX_REGION_PART_LEN)).parse::<RegionId>().is_ok());
    }

    #[test]
    fn a_deployment_name_has_one_to_sixty_four_plain_characters() {
        for text in ["m", "docs-embed", "v1.2_final", &"x".repeat(64)] {
            assert_eq!(text.parse::<DeploymentName>().unwrap().as_str(), text);
        }
        for text in ["", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(text.parse::<DeploymentName>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_does_not_repeat_a_megabyte_back() {
        let error = "/".repeat(1 << 20).parse::<TenantId>().unwrap_err();
        assert!(error.to_string().len() < 256);
    }
}
