//! `meridian check`: reads configuration files as the roles would, and says everything that is wrong with them.
//!
//! Nothing is started: no socket is opened or connected to, no model is fetched, nothing is written. Files that a
//! configuration names (keys, certificates, tokens) are read, because a role that cannot read them does not start.

use crate::cli::CheckFilesOptions;
use crate::{DID_NOT_HOLD, fail};
use gateway::config::{EdgeConfig, check_tenants};
use regions::{Catalogue, parse_deployments, parse_tenants};
use scheduler::config::{HubConfig, SpokeConfig};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Kind of a configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gateway,
    Hub,
    Spoke,
    Replica,
    Deployments,
    /// Tenants of one gateway's own file, with secrets in files or the environment.
    GatewayTenants,
    /// Tenants as `meridian apply` takes them, with hashes of keys.
    AppliedTenants,
    Catalogue,
}

/// Runs the command: exit code 3 when a file is wrong.
pub(crate) fn main(options: &CheckFilesOptions) -> ExitCode {
    let CheckFilesOptions { files, regions } = options;
    let environment = std::env::vars().collect();
    let (mut problems, mut fine) = (Vec::new(), Vec::new());
    let catalogue = match regions.as_deref().map(read_catalogue) {
        None => Catalogue::builtin(),
        Some(Ok(catalogue)) => catalogue,
        Some(Err(found)) => return fail(DID_NOT_HOLD, &found),
    };
    for file in files {
        match check(file, &catalogue, &environment) {
            Ok(kind) => fine.push(format!("{}: valid ({})", file.display(), kind.name())),
            Err(found) => {
                problems.extend(found.iter().map(|problem| format!("{}: {problem}", file.display())));
            }
        }
    }
    if !fine.is_empty() {
        // Whoever reads it may have closed their end.
        writeln!(std::io::stdout(), "{}", fine.join("\n")).ok();
    }
    if problems.is_empty() { ExitCode::SUCCESS } else { fail(DID_NOT_HOLD, &problems) }
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
) -> Result<Kind, Vec<String>> {
    let text = std::fs::read_to_string(file).map_err(|error| vec![format!("cannot be read: {error}")])?;
    let keys: toml::Table = text.parse().map_err(|error: toml::de::Error| vec![error.to_string()])?;
    let kind = Kind::of(&keys).ok_or_else(|| {
        vec![
            "it is not clear what this configures: a gateway has `snapshot`, a hub `data` or [store], a spoke `advertise`, a \
             replica `model`, and the others [[deployment]], [[tenant]] or [regions.CLOUD] tables"
                .to_owned(),
        ]
    })?;
    let base = file.parent().unwrap_or(Path::new("."));
    let in_words = |found: Vec<regions::Problem>| found.iter().map(ToString::to_string).collect();
    match kind {
        Kind::Gateway => EdgeConfig::parse(&text, base, environment).map(drop),
        Kind::Hub => HubConfig::parse(&text, base).map(drop),
        Kind::Spoke => SpokeConfig::parse(&text, base, None).map(drop),
        Kind::Replica => text.parse::<replica::Config>().map(drop).map_err(|error| error.problems),
        Kind::Deployments => parse_deployments(&text, catalogue).map(drop).map_err(in_words),
        Kind::GatewayTenants => check_tenants(&text, base, environment, catalogue),
        Kind::AppliedTenants => parse_tenants(&text, catalogue).map(drop).map_err(in_words),
        Kind::Catalogue => Catalogue::parse(&text).map(drop).map_err(in_words),
    }?;
    Ok(kind)
}

impl Kind {
    /// The kind of a file with these keys, by one that only this kind has.
    fn of(keys: &toml::Table) -> Option<Kind> {
        let has = |key: &str| keys.contains_key(key);
        let tenants = keys.get("tenant").and_then(toml::Value::as_array);
        let has_hashes = tenants.is_some_and(|all| all.iter().any(|one| one.get("key_sha256").is_some()));
        let markers = [
            (has("advertise"), Kind::Spoke),
            (has("snapshot"), Kind::Gateway),
            (has("data") || has("store"), Kind::Hub),
            (has("model"), Kind::Replica),
            (has("deployment"), Kind::Deployments),
            (has("tenant") && has_hashes, Kind::AppliedTenants),
            (has("tenant") || has("issuer"), Kind::GatewayTenants),
            (has("regions") || has("unions"), Kind::Catalogue),
        ];
        markers.into_iter().find_map(|(found, kind)| found.then_some(kind))
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Gateway => "gateway",
            Kind::Hub => "hub",
            Kind::Spoke => "spoke",
            Kind::Replica => "replica",
            Kind::Deployments => "deployments",
            Kind::GatewayTenants => "tenants of a gateway",
            Kind::AppliedTenants => "tenants to apply",
            Kind::Catalogue => "catalogue",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples that people edit.
    #[test]
    fn each_file_is_taken_for_what_it_is() {
        for (file, kind) in [
            ("gateway", Kind::Gateway),
            ("hub", Kind::Hub),
            ("spoke", Kind::Spoke),
            ("replica", Kind::Replica),
            ("deployments", Kind::Deployments),
            ("tenants", Kind::GatewayTenants),
            ("regions", Kind::Catalogue),
        ] {
            let text = std::fs::read_to_string(format!("configs/{file}.toml")).expect("an example");
            assert_eq!(Kind::of(&text.parse().expect("TOML")), Some(kind), "{file}");
        }
        let applied = "[[tenant]]\nname = \"a\"\nkey_sha256 = []\n";
        assert_eq!(Kind::of(&applied.parse().expect("TOML")), Some(Kind::AppliedTenants));
        assert_eq!(Kind::of(&toml::Table::new()), None);
    }

    #[test]
    fn everything_wrong_with_a_file_is_named_and_a_sound_one_is_told_apart() {
        let dir = tempfile::tempdir().expect("a folder");
        let environment = BTreeMap::from([("MERIDIAN_KEY".to_owned(), "s3cret".to_owned())]);
        let check = |text: &str| {
            let file = dir.path().join("file.toml");
            std::fs::write(&file, text).expect("written");
            check(&file, &Catalogue::builtin(), &environment)
        };
        let tenant = "[[tenant]]\nname = \"docs\"\nkey_env = \"MERIDIAN_KEY\"\n";
        assert_eq!(check(tenant), Ok(Kind::GatewayTenants));
        let typo = check(&format!("{tenant}residency = {{ allow = [\"euu\"] }}\nweight = 0\n")).unwrap_err();
        assert_eq!(typo.len(), 2, "{typo:#?}");
        assert!(
            typo[0].contains("\"docs\"") && typo[0].contains("euu") && typo[0].contains("mean eu"),
            "{typo:#?}"
        );
        assert!(check("listen = 1").unwrap_err()[0].contains("not clear"));
        assert!(check("[[").unwrap_err()[0].contains("TOML"));
    }
}
