//! `meridian check`: validates configuration files of any kind as their readers do, and reports all problems.
//!
//! It starts nothing: no socket is opened, no model is fetched, nothing is written. Files that a configuration names
//! (keys, certificates, tokens) are read, because a role that cannot read them does not start. Environment variables are
//! those of another process, so only `--environment` requires them.

use crate::cli::CheckFilesOptions;
use crate::log::LogSettings;
use crate::roles::{base, read_spoke};
use crate::{EXIT_CHECK_FAILED, drill, fail};
use configuration::{ConfigFile, Environment, Files, Problem};
use gateway::config::{EdgeConfig, read_tenants};
use regions::Catalogue;
use scheduler::config::HubConfig;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use telemetry::log_filter::FilterLevel;

/// Kind of a configuration file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConfigKind {
    Spoke,
    Gateway,
    Hub,
    Replica,
    Drill,
    Deployments,
    /// Tenants file for `meridian apply`, with hashes of keys.
    AppliedTenants,
    /// Tenants file of a gateway, with secrets in files or the environment.
    GatewayTenants,
    Catalogue,
}

/// Kinds with their names and keys that only they have: several, because one may be misspelt or missing. The order decides
/// for a file with keys of several kinds.
const KINDS: &[(ConfigKind, &str, &[&str])] = &[
    (ConfigKind::Spoke, "spoke", &["advertise", "replica", "scaling"]),
    (
        ConfigKind::Gateway,
        "gateway",
        &["snapshot", "trusted_peers", "timeouts", "bodies", "cors", "hedge", "spill"],
    ),
    (ConfigKind::Hub, "hub", &["data", "store"]),
    (ConfigKind::Replica, "replica", &["model", "names", "engine", "embeddings"]),
    (ConfigKind::Drill, "drill", &["fleet", "step", "load"]),
    (ConfigKind::Deployments, "deployments", &["deployment"]),
    (ConfigKind::AppliedTenants, "tenants to apply", &[]),
    (ConfigKind::GatewayTenants, "tenants of a gateway", &["tenant", "issuer"]),
    (ConfigKind::Catalogue, "catalogue", &["regions", "unions"]),
];

/// Surroundings of a check.
struct Checker {
    catalogue: Catalogue,
    environment: Option<Environment>,
}

/// Runs the command. Exit code 3 if a file is invalid; a valid file causes no output.
pub(crate) fn main(options: &CheckFilesOptions) -> ExitCode {
    let CheckFilesOptions { files, regions, environment, verbose } = options;
    let mut problems = Vec::new();
    // The catalogue is that of the option, or a catalogue among the files, or the built-in one.
    let among = || files.iter().find(|file| kind_of_file(file) == Some(ConfigKind::Catalogue));
    let catalogue = match regions.as_ref().or_else(among) {
        None => Ok(Catalogue::builtin()),
        Some(file) => read_catalogue(file),
    };
    let catalogue = catalogue.unwrap_or_else(|found| {
        // A catalogue among the files is checked with them.
        problems.extend(found.into_iter().filter(|_| regions.is_some()));
        Catalogue::builtin()
    });
    if *environment {
        problems.extend(LogSettings::of_process(FilterLevel::Info).err().into_iter().flatten());
    }
    let environment = environment.then(Environment::of_process);
    let checker = Checker { catalogue, environment };
    for file in files {
        let (kind, found) = checker.check(file);
        let kind = kind.map_or("unknown kind", ConfigKind::name);
        if !found.is_empty() {
            problems.extend(configuration::named(file, found));
            problems.push(format!("{}: invalid, read as: {kind}", file.display()));
        } else if *verbose {
            eprintln!("{}: valid, read as: {kind}", file.display());
        }
    }
    if problems.is_empty() { ExitCode::SUCCESS } else { fail(EXIT_CHECK_FAILED, &problems) }
}

fn kind_of_file(file: &PathBuf) -> Option<ConfigKind> {
    ConfigKind::of(&ConfigFile::parse(&read_to_string(file).ok()?).ok()?)
}

fn read_catalogue(file: &Path) -> Result<Catalogue, Vec<String>> {
    let text =
        read_to_string(file).map_err(|error| vec![format!("{}: cannot be read: {error}", file.display())])?;
    Catalogue::parse(&text).map_err(|found| configuration::named(file, found))
}

impl Checker {
    /// Returns the kind of a file and its problems.
    fn check(&self, file: &Path) -> (Option<ConfigKind>, Vec<Problem>) {
        let problem = |message: String| vec![Problem { file: None, line: 1, message }];
        let text = match read_to_string(file) {
            Ok(text) => text,
            Err(error) => return (None, problem(format!("cannot be read: {error}"))),
        };
        let document = match ConfigFile::parse(&text) {
            Ok(document) => document,
            Err(found) => return (None, found),
        };
        let Some(kind) = ConfigKind::of(&document) else {
            let message = "unknown kind of configuration: a gateway has `snapshot`, a hub `data` or [store], a spoke \
                           `advertise`, a replica `model`, a drill [fleet], and the others [[deployment]], [[tenant]] \
                           or [regions.CLOUD] tables";
            return (None, problem(message.to_owned()));
        };
        let Checker { catalogue, environment } = self;
        let files = Files { base: base(file), environment: environment.as_ref() };
        match kind {
            ConfigKind::Spoke => drop(read_spoke(&document, &files, None)),
            ConfigKind::Gateway => drop(EdgeConfig::read(&document, &files)),
            ConfigKind::Hub => drop(HubConfig::read(&document, &files)),
            ConfigKind::Replica => drop(replica::Config::read(&document, &files)),
            ConfigKind::Drill => drop(drill::read_document(&document, files.base, catalogue, false)),
            ConfigKind::Deployments => {
                drop(scheduler_core::placement::read_deployments(&document, catalogue))
            }
            ConfigKind::AppliedTenants => drop(regions::tenant::read_tenants(&document, catalogue)),
            ConfigKind::GatewayTenants => drop(read_tenants(&document, &files, catalogue)),
            ConfigKind::Catalogue => drop(regions::catalogue::read_regions(&document)),
        }
        (Some(kind), document.problems())
    }
}

impl ConfigKind {
    /// Returns the kind of a file, by a key that only this kind has.
    fn of(document: &ConfigFile<'_>) -> Option<ConfigKind> {
        // Tenants to apply differ from those of a gateway by a key of some tenant.
        let has_hashes = (0..)
            .map(|at| format!("tenant[{at}]"))
            .take_while(|path| document.has(path))
            .any(|path| document.has(&format!("{path}.key_sha256")));
        let kind = KINDS.iter().find(|(kind, _, keys)| {
            *kind == ConfigKind::AppliedTenants && has_hashes || keys.iter().any(|key| document.has(key))
        });
        kind.map(|(kind, _, _)| *kind)
    }

    fn name(self) -> &'static str {
        KINDS.iter().find(|(kind, _, _)| *kind == self).map_or("", |(_, name, _)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> Option<ConfigKind> {
        ConfigKind::of(&ConfigFile::parse(text).expect("TOML"))
    }

    #[test]
    fn the_kind_of_each_example_file_is_recognized_and_it_is_valid_without_secrets() {
        let checker = Checker { catalogue: Catalogue::builtin(), environment: None };
        for (file, kind) in [
            ("gateway", ConfigKind::Gateway),
            ("hub", ConfigKind::Hub),
            ("spoke", ConfigKind::Spoke),
            ("replica", ConfigKind::Replica),
            ("deployments", ConfigKind::Deployments),
            ("tenants", ConfigKind::GatewayTenants),
            ("regions", ConfigKind::Catalogue),
            ("drills/surge", ConfigKind::Drill),
        ] {
            let file = format!("configs/{file}.toml");
            assert_eq!(checker.check(Path::new(&file)), (Some(kind), Vec::new()), "{file}");
        }
        let applied = "[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"b\"\nkey_sha256 = []\n";
        assert_eq!(kind(applied), Some(ConfigKind::AppliedTenants));
        assert_eq!(kind(""), None);
        let hub = "listen = \"127.0.0.1:7000\"\ndata = \"hub-data\"\n[identity]\ninsecure = true\n";
        assert_eq!(kind(hub), Some(ConfigKind::Hub), "other roles have an identity as well");
        for (file, key, expected) in [
            ("gateway", "snapshot", ConfigKind::Gateway),
            ("spoke", "advertise", ConfigKind::Spoke),
            ("replica", "model", ConfigKind::Replica),
        ] {
            let text = std::fs::read_to_string(format!("configs/{file}.toml")).expect(file);
            let text = text.replace(&format!("\n{key} = "), &format!("\n{key}_ = "));
            assert_eq!(kind(&text), Some(expected), "{key} is misspelt");
        }
    }

    #[test]
    fn all_problems_of_a_file_are_reported_and_a_valid_file_has_none() {
        let dir = tempfile::tempdir().expect("a folder");
        let check = |text: &str, environment: Option<&str>| {
            let file = dir.path().join("file.toml");
            std::fs::write(&file, text).expect("written");
            let environment = environment.map(|key| [("MERIDIAN_KEY", key)].into_iter().collect());
            Checker { catalogue: Catalogue::builtin(), environment }.check(&file)
        };
        let tenant = "[[tenant]]\nname = \"docs\"\nkey_env = \"MERIDIAN_KEY\"\n";
        assert_eq!(check(tenant, Some("s3cret")), (Some(ConfigKind::GatewayTenants), Vec::new()));
        assert_eq!(check(tenant, None), (Some(ConfigKind::GatewayTenants), Vec::new()));
        let (_, missing) = check(&tenant.replace("MERIDIAN_KEY", "OTHER"), Some("s3cret"));
        assert!(missing[0].message.contains("\"OTHER\" is not set in the environment"), "{missing:#?}");
        let typo = format!("{tenant}residency = {{ allow = [\"euu\"] }}\nweight = 0\n");
        let (_, typo) = check(&typo, None);
        assert_eq!(typo.len(), 2, "{typo:#?}");
        let first = typo[0].clone().in_file(Path::new("t.toml")).to_string();
        assert!(
            first.starts_with("t.toml:4: tenant \"docs\": residency.allow: ") && first.contains("mean eu"),
            "{first}"
        );
        assert!(check("listen = 1", None).1[0].message.contains("unknown kind"));
        assert!(check("[[", None).1[0].message.contains("TOML"));
    }

    #[test]
    fn docs_configuration_md_is_the_page_that_the_declarations_render() {
        let head = "# Configuration\n\nAll keys of all configuration files. This page is rendered from the declarations in the code \
                    (`MERIDIAN_WRITE_DOCS=1 cargo test --bin meridian docs_configuration_md`); `configs/` has a commented \
                    example of each file, and `meridian check FILE…` validates files of any kind.\n\nA duration is a whole \
                    number with a unit: `500ms`, `10s`, `2m`, `2h`, `7d`. Sizes are whole numbers in bytes. Paths are \
                    relative to the folder of their file. Secrets are in files or environment variables, which a key \
                    names. Unknown keys are rejected.\n";
        let [gateway, tenants] = EdgeConfig::reference();
        let page = [
            head.to_owned(),
            gateway,
            HubConfig::reference(),
            scheduler::config::SpokeConfig::reference(),
            replica::Config::reference(),
            regions::deployment::reference(),
            tenants,
            Catalogue::reference(),
            loadtest::drill::reference(),
        ]
        .concat();
        if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
            std::fs::write("docs/configuration.md", &page).expect("the page is written");
        }
        let written = std::fs::read_to_string("docs/configuration.md").unwrap_or_default();
        assert!(
            written == page,
            "docs/configuration.md is out of date: run this test with MERIDIAN_WRITE_DOCS=1"
        );
    }
}
