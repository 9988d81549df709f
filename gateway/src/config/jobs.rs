//! `[jobs]` section of `gateway.toml`: gateways of other regions, which may return results that this one may not.

use configuration::{ConfigFile, section};
use http::Uri;
use regions::catalogue::Catalogue;
use regions::region_list::find_region;
use regions::residency::ResidencyPolicy;
use regions::set::RegionIndex;
use std::collections::BTreeSet;

/// Maximum number of gateways of the list: more than there are regions in the catalogue.
const GATEWAYS_MAX: usize = 1024;

section! {
    /// Durable jobs, files and batches.
    #[derive(Default)]
    pub(super) struct ReadersSection {
        /// Gateways of other regions. A result that this gateway may not return is redirected to the nearest of them that may.
        gateway: Vec<ReaderEntry> = Vec::new(), in 0..=GATEWAYS_MAX;
    }
}

section! {
    /// Gateway of another region.
    struct ReaderEntry {
        /// Region of the gateway, which is the `region` in its own file.
        region: String, like "\"aws/eu-central-1\"";
        /// URL by which clients reach it: scheme, host and, if it is not the default, the port.
        url: String, like "\"https://eu.example.com\"";
    }
}

/// Gateways of other regions, by region and with their URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReaderGateways(Vec<(RegionIndex, String)>);

impl ReadersSection {
    /// Validates the list.
    pub(super) fn read(self, document: &ConfigFile<'_>, catalogue: &Catalogue) -> Option<ReaderGateways> {
        let mut gateways = Vec::new();
        let (mut regions, mut urls) = (BTreeSet::new(), BTreeSet::new());
        let mut is_valid = true;
        for (index, ReaderEntry { region, url }) in self.gateway.into_iter().enumerate() {
            let mut problem = |key: &str, problem: &str| {
                document.problem(&format!("jobs.gateway[{index}].{key}"), problem);
                is_valid = false;
            };
            let found = match find_region(&region, catalogue) {
                Ok(id) => catalogue.index_of(&id),
                Err(text) => {
                    problem("region", &text.to_string());
                    None
                }
            };
            if found.is_some_and(|region| !regions.insert(region)) {
                problem(
                    "region",
                    &format!(
                        "\"{region}\" has two gateways; keep one URL, such as that of their load balancer"
                    ),
                );
            }
            let origin = origin(&url);
            match &origin {
                Ok(origin) if !urls.insert(origin.clone()) => {
                    problem("url", &format!("\"{url}\" is written twice; each region has its own gateway"));
                }
                Ok(_) => {}
                Err(what) => {
                    // A URL with a password is not shown.
                    let shown = if url.contains('@') { String::new() } else { format!("\"{url}\" ") };
                    let fix = "write scheme, host and port, as \"https://eu.example.com\"";
                    problem("url", &format!("{shown}{what}; {fix}"));
                }
            }
            gateways.extend(found.zip(origin.ok()));
        }
        is_valid.then_some(ReaderGateways(gateways))
    }
}

/// Returns a URL without its final slash.
fn origin(url: &str) -> Result<String, &'static str> {
    let uri: Uri = url.parse().map_err(|_| "is not a URL")?;
    match uri.scheme_str() {
        Some("https" | "http") => {}
        Some(_) => return Err("has another scheme than https and http"),
        None => return Err("has no scheme"),
    }
    let authority = uri.authority().ok_or("has no host")?;
    if authority.as_str().contains('@') {
        return Err("has a user or a password");
    }
    if authority.host().is_empty() {
        return Err("has no host");
    }
    if uri.path() != "/" || uri.query().is_some() || url.contains('#') {
        return Err("has a path, a query or a fragment");
    }
    Ok(url.trim_end_matches('/').to_ascii_lowercase())
}

impl ReaderGateways {
    /// Returns the URL of the gateway nearest to `here` in another region that `policy` allows.
    pub(crate) fn nearest(
        &self,
        policy: &ResidencyPolicy,
        here: RegionIndex,
        catalogue: &Catalogue,
    ) -> Option<&str> {
        let allowed = policy.permitted(catalogue);
        let point = |region| catalogue.region(region).point;
        let choices = self.0.iter().filter(|(region, _)| *region != here && allowed.contains(*region));
        let nearest = choices.min_by(|(one, _), (other, _)| {
            let (near, far) = (point(here).distance_km(point(*one)), point(here).distance_km(point(*other)));
            near.total_cmp(&far).then(one.cmp(other))
        });
        nearest.map(|(_, url)| url.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    section! {
        /// File with gateways.
        struct WithReaders {
            /// Jobs.
            jobs: ReadersSection;
        }
    }

    fn read(text: &str) -> Result<ReaderGateways, Vec<String>> {
        let read = ConfigFile::read(text, |document| {
            document.section::<WithReaders>()?.jobs.read(document, &Catalogue::builtin())
        });
        read.map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    fn entry(region: &str, url: &str) -> String {
        format!("[[jobs.gateway]]\nregion = \"{region}\"\nurl = \"{url}\"\n")
    }

    #[test]
    fn the_nearest_gateway_in_an_allowed_region_is_selected() {
        let catalogue = Catalogue::builtin();
        let text = [
            entry("aws/eu-central-1", "https://eu.example.com/"),
            entry("aws/eu-west-1", "http://ie.example.com:8080"),
            entry("aws/us-east-1", "https://us.example.com"),
        ];
        let gateways = read(&text.concat()).expect("valid");
        let here = |id: &str| catalogue.index_of(&id.parse().expect("a region")).expect("known");
        for (policy, from, expected) in [
            ("eu", "aws/us-east-1", Some("http://ie.example.com:8080")),
            ("eu & de", "aws/us-east-1", Some("https://eu.example.com")),
            ("eu", "aws/eu-west-1", Some("https://eu.example.com")),
            ("us", "aws/us-east-1", None),
            ("jp", "aws/us-east-1", None),
            ("anywhere", "aws/us-east-2", Some("https://us.example.com")),
        ] {
            let policy = policy.parse().expect("a policy");
            assert_eq!(gateways.nearest(&policy, here(from), &catalogue), expected, "{policy} {from}");
        }
        assert_eq!(read(""), Ok(ReaderGateways::default()));
    }

    #[test]
    fn each_mistake_is_named_with_its_entry() {
        let text = [
            entry("aws/atlantis-1", "https://a.example.com"),
            entry("aws/eu-central-1", "eu.example.com"),
            entry("aws/eu-west-1", "https://b.example.com/v1"),
            entry("aws/eu-west-1", "https://c.example.com"),
            entry("aws/us-east-1", "https://C.example.com/"),
            entry("aws/us-east-2", "https://user:pw@d.example.com"),
            entry("aws/us-west-2", "ftp://d.example.com"),
        ];
        let problems = read(&text.concat()).expect_err("mistakes");
        let expected = [
            "jobs.gateway 1: region",
            "jobs.gateway 2: url: \"eu.example.com\" has no scheme",
            "jobs.gateway 3: url: \"https://b.example.com/v1\" has a path",
            "jobs.gateway 4: region: \"aws/eu-west-1\" has two gateways",
            "jobs.gateway 5: url: \"https://C.example.com/\" is written twice",
            "jobs.gateway 6: url: has a user or a password",
            "jobs.gateway 7: url: \"ftp://d.example.com\" has another scheme",
        ];
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, part) in problems.iter().zip(expected) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
        let problems = read("[[jobs.gateway]]\nregion = \"aws/us-east-1\"").expect_err("no URL");
        assert!(problems[0].contains("url"), "{problems:?}");
    }
}
