//! `meridian check`: validates configuration files as the roles would, and reports all problems.
//!
//! It starts nothing: no socket is opened, no model is fetched, nothing is written. Files that a configuration names
//! (keys, certificates, tokens) are read, because a role that cannot read them does not start.

use crate::cli::CheckFilesOptions;
use crate::{EXIT_CHECK_FAILED, fail};
use gateway::config::{EdgeConfig, check_tenants};
use regions::{Catalogue, parse_deployments, parse_tenants};
use scheduler::config::{HubConfig, SpokeConfig};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Kind of a configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConfigKind {
    Gateway,
    Hub,
    Spoke,
    Replica,
    Deployments,
    /// Tenants file of a gateway, with secrets in files or the environment.
    GatewayTenants,
    /// Tenants file for `meridian apply`, with hashes of keys.
    AppliedTenants,
    Catalogue,
}

/// Runs the command. Exit code 3 if a file is invalid.
pub(crate) fn main(options: &CheckFilesOptions) -> ExitCode {
    let CheckFilesOptions { files, regions } = options;
    let environment = std::env::vars().collect();
    let (mut problems, mut valid) = (Vec::new(), Vec::new());
    let catalogue = match regions.as_deref().map(read_catalogue) {
        None => Catalogue::builtin(),
        Some(Ok(catalogue)) => catalogue,
        Some(Err(found)) => return fail(EXIT_CHECK_FAILED, &found),
    };
    for file in files {
        match check(file, &catalogue, &environment) {
            Ok(kind) => valid.push(format!("{}: valid ({})", file.display(), kind.name())),
            Err(found) => {
                problems.extend(found.iter().map(|problem| format!("{}: {problem}", file.display())));
            }
        }
    }
    if !valid.is_empty() {
        // The reader may have closed the pipe.
        writeln!(std::io::stdout(), "{}", valid.join("\n")).ok();
    }
    if problems.is_empty() { ExitCode::SUCCESS } else { fail(EXIT_CHECK_FAILED, &problems) }
}

fn read_catalogue(file: &Path) -> Result<Catalogue, Vec<String>> {
    let named = |problem: String| format!("{}: {problem}", file.display());
    let text =
        std::fs::read_to_string(file).map_err(|error| vec![named(format!("cannot be read: {error}"))])?;
    Catalogue::parse(&text).map_err(|found| found.iter().map(|problem| named(problem.to_string())).collect())
}

fn check(
    file: &Path,
    catalogue: &Catalogue,
    environment: &BTreeMap<String, String>,
) -> Result<ConfigKind, Vec<String>> {
    let text = std::fs::read_to_string(file).map_err(|error| vec![format!("cannot be read: {error}")])?;
    let keys: toml::Table = text.parse().map_err(|error: toml::de::Error| vec![error.to_string()])?;
    let kind = ConfigKind::of(&keys).ok_or_else(|| {
        vec![
            "unknown kind of configuration: a gateway has `snapshot`, a hub `data` or [store], a spoke `advertise`, a replica \
             `model`, and the others [[deployment]], [[tenant]] or [regions.CLOUD] tables"
                .to_owned(),
        ]
    })?;
    let base = file.parent().unwrap_or(Path::new("."));
    let messages = |found: Vec<regions::Problem>| found.iter().map(ToString::to_string).collect();
    match kind {
        ConfigKind::Gateway => EdgeConfig::parse(&text, base, environment).map(drop),
        ConfigKind::Hub => HubConfig::parse(&text, base).map(drop),
        ConfigKind::Spoke => SpokeConfig::parse(&text, base, None).map(drop),
        ConfigKind::Replica => text.parse::<replica::Config>().map(drop).map_err(|error| error.problems),
        ConfigKind::Deployments => parse_deployments(&text, catalogue).map(drop).map_err(messages),
        ConfigKind::GatewayTenants => check_tenants(&text, base, environment, catalogue),
        ConfigKind::AppliedTenants => parse_tenants(&text, catalogue).map(drop).map_err(messages),
        ConfigKind::Catalogue => Catalogue::parse(&text).map(drop).map_err(messages),
    }?;
    Ok(kind)
}

impl ConfigKind {
    /// Returns the kind of a file with these keys, by a key that only this kind has.
    fn of(keys: &toml::Table) -> Option<ConfigKind> {
        let has = |key: &str| keys.contains_key(key);
        let tenants = keys.get("tenant").and_then(toml::Value::as_array);
        let has_hashes = tenants.is_some_and(|all| all.iter().any(|one| one.get("key_sha256").is_some()));
        let markers = [
            (has("advertise"), ConfigKind::Spoke),
            (has("snapshot"), ConfigKind::Gateway),
            (has("data") || has("store"), ConfigKind::Hub),
            (has("model"), ConfigKind::Replica),
            (has("deployment"), ConfigKind::Deployments),
            (has("tenant") && has_hashes, ConfigKind::AppliedTenants),
            (has("tenant") || has("issuer"), ConfigKind::GatewayTenants),
            (has("regions") || has("unions"), ConfigKind::Catalogue),
        ];
        markers.into_iter().find_map(|(found, kind)| found.then_some(kind))
    }

    fn name(self) -> &'static str {
        match self {
            ConfigKind::Gateway => "gateway",
            ConfigKind::Hub => "hub",
            ConfigKind::Spoke => "spoke",
            ConfigKind::Replica => "replica",
            ConfigKind::Deployments => "deployments",
            ConfigKind::GatewayTenants => "tenants of a gateway",
            ConfigKind::AppliedTenants => "tenants to apply",
            ConfigKind::Catalogue => "catalogue",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_each_example_file_is_recognized() {
        for (file, kind) in [
            ("gateway", ConfigKind::Gateway),
            ("hub", ConfigKind::Hub),
            ("spoke", ConfigKind::Spoke),
            ("replica", ConfigKind::Replica),
            ("deployments", ConfigKind::Deployments),
            ("tenants", ConfigKind::GatewayTenants),
            ("regions", ConfigKind::Catalogue),
        ] {
            let text = std::fs::read_to_string(format!("configs/{file}.toml")).expect("an example");
            assert_eq!(ConfigKind::of(&text.parse().expect("TOML")), Some(kind), "{file}");
        }
        let applied = "[[tenant]]\nname = \"a\"\nkey_sha256 = []\n";
        assert_eq!(ConfigKind::of(&applied.parse().expect("TOML")), Some(ConfigKind::AppliedTenants));
        assert_eq!(ConfigKind::of(&toml::Table::new()), None);
    }

    #[test]
    fn all_problems_of_a_file_are_reported_and_a_valid_file_has_none() {
        let dir = tempfile::tempdir().expect("a folder");
        let environment = BTreeMap::from([("MERIDIAN_KEY".to_owned(), "s3cret".to_owned())]);
        let check = |text: &str| {
            let file = dir.path().join("file.toml");
            std::fs::write(&file, text).expect("written");
            check(&file, &Catalogue::builtin(), &environment)
        };
        let tenant = "[[tenant]]\nname = \"docs\"\nkey_env = \"MERIDIAN_KEY\"\n";
        assert_eq!(check(tenant), Ok(ConfigKind::GatewayTenants));
        let typo = check(&format!("{tenant}residency = {{ allow = [\"euu\"] }}\nweight = 0\n")).unwrap_err();
        assert_eq!(typo.len(), 2, "{typo:#?}");
        assert!(
            typo[0].contains("\"docs\"") && typo[0].contains("euu") && typo[0].contains("mean eu"),
            "{typo:#?}"
        );
        assert!(check("listen = 1").unwrap_err()[0].contains("unknown kind"));
        assert!(check("[[").unwrap_err()[0].contains("TOML"));
    }
}
