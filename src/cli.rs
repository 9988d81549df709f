//! What can be typed.

mod load;
mod model;

pub(crate) use load::{CompareOptions, LoadCommand, LoadOptions};
pub(crate) use model::{BuildOptions, CheckOptions, ModelCommand};

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// One global endpoint for embedding models in many regions of many clouds.
#[derive(Debug, Parser)]
#[command(name = "meridian", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a whole world on this machine: a hub, regions with emulated distance, a gateway
    Up(UpOptions),
    /// Run an edge gateway: the place that clients connect to
    Gateway(GatewayOptions),
    /// Run a hub: publishes the route table
    Hub(RoleOptions),
    /// Run a spoke: a region's ingress and its agent
    Spoke(RegionalRoleOptions),
    /// Run a replica: a model server
    Replica(RegionalRoleOptions),
    /// Read configuration files and say everything that is wrong with them; nothing is started and no socket is touched
    Check(CheckFilesOptions),
    /// Fetch models into the local cache, list them, build and verify engines of them
    #[command(subcommand)]
    Model(ModelCommand),
    /// Change what is deployed, and for whom, as files say
    Apply(ApplyOptions),
    /// Read back what is deployed, where, and what of it is still on its way
    Get(GetOptions),
    /// Say why a request went where it went
    Explain(ExplainOptions),
    /// Empty a region: what may go elsewhere goes elsewhere
    Drain(DrainOptions),
    /// Audit receipts: did every request stay where it was allowed to be?
    VerifyResidency(VerifyOptions),
    /// Put load on an endpoint and see what callers get, and from where
    Load(Box<LoadOptions>),
    /// Press a button and see the proof: at this moment do that, and expect the other within so long
    Drill(DrillOptions),
    /// Find batch settings for a model on this machine; replicas pick them up
    Tune(TuneOptions),
    /// Become another program that ends with the process that started this one: how `up` starts an etcd
    #[command(hide = true)]
    WithParent(OtherProgram),
    /// Run a replica that takes its time and computes nothing: for drills
    #[command(hide = true)]
    ScriptedReplica(ScriptedOptions),
}

#[derive(Debug, Args)]
pub(crate) struct OtherProgram {
    /// The program
    pub program: String,
    /// And what it is told
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ScriptedOptions {
    /// Where it listens
    #[arg(long)]
    pub listen: std::net::SocketAddr,
    /// How fast it says that it computes
    #[arg(long)]
    pub inputs_per_second: u32,
    /// A deployment that it answers to
    #[arg(long = "name", required = true)]
    pub names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DrillOptions {
    /// The drill, as those under configs/drills
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Read it, say what is wrong with it, and do nothing
    #[arg(long)]
    pub check: bool,
    /// For machines: JSON on stdout instead of the timeline
    #[arg(long)]
    pub json: bool,
    /// Where a report with plots goes: one page that needs no network
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Put the load on this deployment, and do to it what can be done there (surge, drain), instead of starting a world
    #[arg(long, value_name = "URL")]
    pub against: Option<String>,
    /// The API key of that deployment
    #[arg(long, env = "MERIDIAN_KEY", hide_env_values = true, default_value = "local")]
    pub key: String,
    /// A hub of that deployment, where the drill drains
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB")]
    pub hub: Option<String>,
    /// Holds the operator's token, where the drill drains
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Keep configurations and logs of the world in this directory; without it, they are thrown away
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct GatewayOptions {
    /// The role's configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Take the sockets of the gateway that runs with this file (`handover` in it), which then finishes what it has and
    /// ends; where none runs, start as usual. Without this option a gateway that runs is left alone, and this one ends
    #[arg(long)]
    pub take_over: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RoleOptions {
    /// The role's configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct RegionalRoleOptions {
    /// The role's configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// The region that it stands in, as cloud/region
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct UpOptions {
    /// How many regions, or which: a number, or a list as aws/us-east-1,gcp/europe-west4
    #[arg(long, value_name = "N|LIST", default_value = "3")]
    pub regions: String,
    /// Where clients connect, on loopback; 0 takes any free port
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// The API key that clients send
    #[arg(long, default_value = "local")]
    pub key: String,
    /// Clients come over TLS, to a certificate that is made for this world; it is named when the world is ready
    #[arg(long)]
    pub tls: bool,
    /// Where the hub keeps what it knows: in a file of its own, or in an etcd of three members that is started for it
    #[arg(long, value_enum, default_value_t = StoreKind::Embedded)]
    pub store: StoreKind,
    /// How many hubs; several share an etcd
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub hubs: u32,
    /// What is deployed; without it, all-MiniLM-L6-v2 everywhere and once locked to the EU. Where one says `scaling`, spokes
    /// start and stop the replicas of this world
    #[arg(long, value_name = "FILE")]
    pub deployments: Option<PathBuf>,
    /// The catalogue of clouds and regions; without it, the built-in one
    #[arg(long, value_name = "FILE")]
    pub catalogue: Option<PathBuf>,
    /// Where configurations, logs and state are kept; without it, under the user's state directory
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Where the hub of a world keeps what it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoreKind {
    Embedded,
    Etcd,
}

#[derive(Debug, Args)]
pub(crate) struct CheckFilesOptions {
    /// Files of any kind: of a role, of deployments, of tenants, of regions
    #[arg(value_name = "FILE", num_args = 1.., required = true)]
    pub files: Vec<PathBuf>,
    /// The catalogue by which deployments and tenants are read; without it, the built-in one
    #[arg(long, value_name = "FILE")]
    pub regions: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ApplyOptions {
    /// Files of [[deployment]], files of [[tenant]], or both: all that there shall be of that kind; what is in none of them is
    /// taken away, and of a kind of which there is no file everything stays
    #[arg(value_name = "FILE", num_args = 1.., required_unless_present = "promote")]
    pub files: Vec<PathBuf>,
    /// Keep traffic on the old model of each deployment whose model changes, until --promote
    #[arg(long, conflicts_with = "promote")]
    pub hold: bool,
    /// Let the next model of this deployment replace the one that is served, when its replicas are ready
    #[arg(long, value_name = "NAME", conflicts_with_all = ["files", "dry_run"])]
    pub promote: Option<String>,
    /// The hub, or any of several
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Holds the operator's token; without it, the variable MERIDIAN_OPERATOR_TOKEN does
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Show what would change, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// For machines: JSON on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GetOptions {
    /// Of what
    #[arg(value_enum)]
    pub what: Got,
    /// Only this one
    pub name: Option<String>,
    /// The hub, or any of several
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Holds the operator's token, or the fleet's; without it, the variable MERIDIAN_OPERATOR_TOKEN does. A hub that has no
    /// fleet token needs none
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// For machines: JSON on stdout
    #[arg(long)]
    pub json: bool,
}

/// What can be read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Got {
    /// What was applied, as the file that says so
    Deployments,
    /// Who may come in, as the file that says so; keys are hashes
    Tenants,
    /// Where regions are reached and what is ready there
    Regions,
    /// How requests are divided over regions, and why; only for this deployment, if one is named
    Plan,
    /// The replicas of each deployment and their model revisions; changes that are under way, and what they wait for
    Rollout,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainOptions {
    /// The request's identifier: the header x-request-id of its answer
    #[arg(value_name = "REQUEST_ID")]
    pub id: String,
    /// The operations port of the gateway that served it
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub gateway: String,
    /// For machines: what the gateway says, as it says it
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DrainOptions {
    /// The region, as cloud/region
    #[arg(value_name = "REGION")]
    pub region: String,
    /// Use it again
    #[arg(long)]
    pub undo: bool,
    /// A hub; any of them, where there are several
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Holds the operator's token; without it, the variable MERIDIAN_OPERATOR_TOKEN does
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// For machines: JSON on stdout instead of a sentence
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyOptions {
    /// Folders of receipts: those of gateways, and those of spokes to confirm them
    #[arg(long, value_name = "DIR", num_args = 1.., required = true)]
    pub receipts: Vec<PathBuf>,
    /// The catalogue by which policies are read; without it, the built-in one
    #[arg(long, value_name = "FILE")]
    pub regions: Option<PathBuf>,
    /// A head that was noted elsewhere and must stand in a chain; may be given several times
    #[arg(long = "head", value_name = "HASH")]
    pub heads: Vec<String>,
    /// A receipt that somebody was given and that must be there; may be given several times
    #[arg(long = "receipt", value_name = "ID")]
    pub held: Vec<String>,
    /// Let chains begin after their first file, because earlier ones are archived elsewhere
    #[arg(long)]
    pub partial: bool,
    /// Judge only requests of this tenant: its name, with --pseudonym-key-file, or else its pseudonym
    #[arg(long, value_name = "TENANT")]
    pub tenant: Option<String>,
    /// The key of tenants' pseudonyms, as gateways have it
    #[arg(long, value_name = "FILE", requires = "tenant")]
    pub pseudonym_key_file: Option<PathBuf>,
    /// Judge only requests of this deployment
    #[arg(long, value_name = "NAME")]
    pub deployment: Option<String>,
    /// Judge only requests from this time on, as 2026-03-01T00:00:00Z or in milliseconds since 1970
    #[arg(long, value_name = "TIME")]
    pub from: Option<String>,
    /// Judge only requests before this time
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// The signed checkpoint of the chains' heads: compared with the chains, and renewed if they are whole
    #[arg(long, value_name = "FILE", requires = "checkpoint_key_file")]
    pub checkpoint: Option<PathBuf>,
    /// The auditor's key, by which the checkpoint is signed: 16 bytes or more that the audited do not have
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    pub checkpoint_key_file: Option<PathBuf>,
    /// Begin a checkpoint where there is none yet
    #[arg(long, requires = "checkpoint")]
    pub init_checkpoint: bool,
    /// How old a receipt must be, seen from the newest, before its counterpart is missed; while chains are being written
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub settle: u64,
    /// For machines: JSON on stdout instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// The model, as a replica's configuration names it; fetched if it is not here yet
    #[arg(long, value_name = "SOURCE")]
    pub model: String,
    /// The precisions to try, of which those that are not good enough are left out
    #[arg(long, value_name = "LIST", default_value = "f32,int8")]
    pub precision: String,
    /// How long a lone request may take beside a backfill, in 99 of 100 cases
    #[arg(long, value_name = "N")]
    pub target_p99_ms: Option<u64>,
    /// How long to measure
    #[arg(long, default_value_t = replica::tune::SECONDS)]
    pub seconds: u64,
    /// For machines: JSON on stdout instead of tables
    #[arg(long)]
    pub json: bool,
    /// Where the settings go, with the plot beside them; without it, the model cache, where replicas find them
    #[arg(long, value_name = "FILE")]
    pub out: Option<std::path::PathBuf>,
}
