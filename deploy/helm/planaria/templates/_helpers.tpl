{{- define "planaria.labels" -}}
app.kubernetes.io/name: planaria
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "planaria.pod" -}}
metadata:
  labels:
    {{- include "planaria.labels" . | nindent 4 }}
  {{- if .Values.podAnnotations }}
  annotations:
    {{- toYaml .Values.podAnnotations | nindent 4 }}
  {{- end }}
spec:
  # Draining, plus what ends it, plus the pause of preStop.
  terminationGracePeriodSeconds: {{ add .Values.drainSeconds 30 }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: planaria
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if gt (int .Values.nodes) 1 }}
      # The number at the end of the pod's name is the node's.
      command: ["sh", "-c", "exec planaria serve \"$@\" --node-rank \"${HOSTNAME##*-}\"", "planaria"]
      args:
      {{- else }}
      args:
        - serve
      {{- end }}
        - {{ required "model is needed: a hub id, or a path below models.path" .Values.model | quote }}
        - "--host=0.0.0.0"
        - "--port=8000"
        - "--shutdown-timeout={{ .Values.drainSeconds }}"
        {{- if .Values.servedModelName }}
        - "--served-model-name={{ .Values.servedModelName }}"
        {{- end }}
        {{- if gt (int .Values.nodes) 1 }}
        - "--nnodes={{ .Values.nodes }}"
        - "--master-addr={{ .Release.Name }}-0.{{ .Release.Name }}-nodes"
        {{- end }}
        {{- range .Values.options }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- if gt (int .Values.nodes) 1 }}
        - name: PLANARIA_HOST_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: PLANARIA_SECRET
          valueFrom: {secretKeyRef: {name: {{ required "secrets.nodes is needed with nodes > 1" .Values.secrets.nodes | quote }}, key: secret}}
        {{- end }}
        {{- if .Values.secrets.apiKey }}
        - name: PLANARIA_API_KEY
          valueFrom: {secretKeyRef: {name: {{ .Values.secrets.apiKey | quote }}, key: api-key}}
        - name: PLANARIA_ADMIN_KEY
          valueFrom: {secretKeyRef: {name: {{ .Values.secrets.apiKey | quote }}, key: admin-key}}
        {{- end }}
        {{- if .Values.secrets.huggingFace }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .Values.secrets.huggingFace | quote }}, key: token}}
        {{- end }}
      ports:
        - name: http
          containerPort: 8000
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      {{- if eq (int .Values.nodes) 1 }}
      # Loading may take long: nobody is killed for that before startSeconds are over.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: {{ div .Values.startSeconds 5 }}
      # /health is 503 during a recovery: no new requests then, and no restart, which would lose what the recovery keeps.
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        httpGet: {path: /version, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      # Balancers hear of a pod's end after it was told: it serves on for so long.
      lifecycle:
        preStop:
          exec: {command: ["sleep", "5"]}
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if .Values.models.existingClaim }}
        - {name: models, mountPath: {{ .Values.models.path | quote }}, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory | quote }}}
    {{- if .Values.cache.existingClaim }}
    - name: cache
      persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim | quote }}}
    {{- else }}
    - name: cache
      emptyDir: {sizeLimit: {{ .Values.cache.size | quote }}}
    {{- end }}
    {{- if .Values.models.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim | quote }}, readOnly: true}
    {{- end }}
  {{- if .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml .Values.nodeSelector | nindent 4 }}
  {{- end }}
  {{- if .Values.tolerations }}
  tolerations:
    {{- toYaml .Values.tolerations | nindent 4 }}
  {{- end }}
  {{- if .Values.affinity }}
  affinity:
    {{- toYaml .Values.affinity | nindent 4 }}
  {{- end }}
{{- end }}
