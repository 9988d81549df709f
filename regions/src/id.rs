//! Names of regions, spoke instances, deployments, tenants and accelerator types.
//!
//! A region is named `cloud/name` with the provider's own name for it, which is also on the provider's invoices and in
//! its documentation; the cloud makes it unique (`us-east-1` alone is a region of several clouds). Names are case
//! sensitive: `us-east-1` and `US-EAST-1` are two names, and the error for an unknown one suggests the other.
//! They are cheap to clone, since every event and every route carries one.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Maximum length of a region's name within its cloud, and of a cloud's name. The longest in use today has 20 bytes.
pub const MAX_REGION_PART_LEN: usize = 48;

/// Maximum length of the name of a deployment or a tenant. Fits a DNS label and a metric label.
pub const MAX_NAME_LEN: usize = 64;

/// Error for a text that is not a valid name of this kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a {what}: write {expected}")]
pub struct IdError {
    /// Kind of name that was expected.
    pub what: &'static str,
    /// Given text, cut to a printable length.
    pub given: String,
    /// Expected form, with an example.
    pub expected: &'static str,
}

impl IdError {
    fn new(what: &'static str, given: &str, expected: &'static str) -> IdError {
        IdError { what, given: given.chars().take(MAX_NAME_LEN).collect(), expected }
    }
}

/// Region of a cloud: `cloud/name`, such as `gcp/europe-west4`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(Arc<str>);

impl RegionId {
    /// Returns the cloud, such as `gcp`.
    pub fn cloud(&self) -> &str {
        self.parts().0
    }

    /// Returns the provider's own name of the region, such as `europe-west4`.
    pub fn name(&self) -> &str {
        self.parts().1
    }

    /// Returns the full name, such as `gcp/europe-west4`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').expect("from_str is the only constructor and requires the slash")
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

configuration::text_values! {
    DeploymentName = "deployment name",
    TenantId = "tenant name",
    InstanceName = "instance name",
    AcceleratorType = "accelerator type",
}

/// Returns whether `text` has 1 to `max_len` characters, all of which need no quoting in a URL, a header, a file name or
/// a label.
fn is_name(text: &str, max_len: usize) -> bool {
    (1..=max_len).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

macro_rules! name_type {
    ($(#[$doc:meta])+ $type:ident, $what:literal, $example:literal) => {
        $(#[$doc])+
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Returns the name as text.
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
    /// Name of a deployment, which clients send in `model`.
    DeploymentName, "deployment name", "docs-embed"
}

name_type! {
    /// Name of a tenant, given by the operator.
    TenantId, "tenant name", "acme-search"
}

name_type! {
    /// Name of a spoke instance, unique within its region.
    InstanceName, "instance name", "spoke-a"
}

name_type! {
    /// Type of an accelerator, as the catalogue names it.
    AcceleratorType, "type of accelerator", "l4"
}

macro_rules! impl_text_traits {
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

        // Equality, order and hash equal those of the text, so a map with these keys can be queried with a plain &str.
        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    )+};
}

impl_text_traits!(RegionId, DeploymentName, TenantId, InstanceName, AcceleratorType);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_name_has_a_cloud_and_the_providers_own_name() {
        let id: RegionId = "gcp/europe-west4".parse().unwrap();
        assert_eq!((id.cloud(), id.name(), id.as_str()), ("gcp", "europe-west4", "gcp/europe-west4"));
        let id: RegionId = "coreweave/US-EAST-04".parse().unwrap();
        assert_eq!(id.to_string(), "coreweave/US-EAST-04");
    }

    #[test]
    fn a_malformed_region_name_is_rejected_with_an_example() {
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
    fn an_error_message_repeats_only_a_prefix_of_a_long_name() {
        let error = "/".repeat(1 << 20).parse::<TenantId>().unwrap_err();
        assert!(error.to_string().len() < 256);
    }
}
